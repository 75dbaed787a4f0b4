"""A stack: its plan, its run folder, its processes as a whole."""
