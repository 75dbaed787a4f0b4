"""The client side of SGLang: servers, routing, streaming, answers."""
