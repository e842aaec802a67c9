"""Needs of a run, known before it is paid for: parameters, memory, time, and which layouts would be better."""
