"""SGLang's HTTP endpoints of the CPU engine."""
