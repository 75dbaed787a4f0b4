"""What a run is told: one experiment file, its services, its training."""
