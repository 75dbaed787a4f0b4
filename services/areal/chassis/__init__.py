"""The process every service is: gRPC with health and reflection, /metrics, drain on SIGTERM."""
