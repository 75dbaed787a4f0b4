"""Runs a recipe's `main` under torchrun and tells how it goes.

Owns the training process: ranks, signals, the session around the recipe, the status RPC. It never
decides what is trained on (the ledger does) nor who serves which weights (weight-sync does).

Core: `areal_torch/training/session.py`
"""
