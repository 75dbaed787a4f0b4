"""How a model is spread over ranks: process group, shards, memory."""
