"""Where processes are started: this machine, and later Kubernetes, Slurm, Ray."""
