"""Creation of a user's configuration from the model, the data and the hardware, with a reason for every value."""
