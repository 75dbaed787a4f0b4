"""What a model's config says about each of its layers."""

from __future__ import annotations

from typing import Any

TOKENWISE = frozenset({"mlp", "moe"})
"""Types of layers in which tokens do not interact."""
RECURRENT = frozenset({"linear_attention", "mamba", "conv"})
"""Types of layers with a state or a convolution; see `recurrent`."""
CHUNKED = "chunked_attention"
"""Types of layers in which a token sees only its own chunk of its sequence, as in Llama 4."""


def layer_types(config: Any) -> list[str]:
    """Returns each layer's type, as a text config has them; empty: all are attention."""
    names = ("layer_types", "layers_block_type")
    return next((list(kinds) for name in names if (kinds := getattr(config, name, None))), [])


def layer_configs(config: Any) -> list[Any]:
    """Returns the text config as each layer reads it: some models have heads of several sizes."""
    count = int(getattr(config, "num_hidden_layers", None) or 1)  # blt's has none
    if not getattr(config, "is_heterogeneous", False):
        return [config] * count
    return [config.per_layer_config[number] for number in range(count)]


def chunk_sizes(config: Any) -> list[Any]:
    """Returns the sizes of chunks, in tokens, that a text config gives its CHUNKED layers."""
    layers = zip(layer_types(config), layer_configs(config), strict=False)
    sizes = (
        getattr(each, "attention_chunk_size", None) for kind, each in layers if kind == CHUNKED
    )
    return list(dict.fromkeys(sizes))


def attention_layers(config: Any) -> list[Any]:
    """Returns the configs of those layers that have attention."""
    configs = layer_configs(config)
    kinds = layer_types(config) or ["attention"] * len(configs)
    return [
        each for each, kind in zip(configs, kinds, strict=True) if kind not in RECURRENT | TOKENWISE
    ]
