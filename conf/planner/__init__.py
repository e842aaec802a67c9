"""Needs of a run before it starts: parameters, memory, time, and better layouts."""
