"""SGLang's HTTP endpoints."""
