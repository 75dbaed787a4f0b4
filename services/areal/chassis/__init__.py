"""What every service's process has: gRPC with health and reflection, /metrics, drain on SIGTERM."""
