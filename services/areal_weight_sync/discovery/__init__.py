"""Where inference servers are found."""
