"""One file per stack: its keys, their counterparts here, its defaults, and the keys that do not matter here."""
