"""Spreads a model over ranks: process group, shards, memory."""
