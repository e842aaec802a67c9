"""A configuration of one's own: read from the model, the data and the hardware, with a reason beside every value."""
