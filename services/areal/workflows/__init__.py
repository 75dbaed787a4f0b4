"""How an episode is run: workflows."""
