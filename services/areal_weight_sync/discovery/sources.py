"""The sources that `endpoints.inference` names."""

from __future__ import annotations

from collections.abc import Sequence

from areal.config.server_sources import ServerSource, SourceKind, parse_source
from areal.errors import InvalidInput
from areal_weight_sync.discovery.base import Source, StaticSource
from areal_weight_sync.engine.http import normalize_url


def make_sources(entries: Sequence[str]) -> list[Source]:
    """Returns the sources of `endpoints.inference`.

    Raises:
        ConfigError: An entry is malformed, or the package that it needs is not installed.
    """
    return [_make(parse_source(entry)) for entry in dict.fromkeys(entries)]


def _make(source: ServerSource) -> Source:
    if source.kind is SourceKind.DNS:
        from areal_weight_sync.discovery.dns import DnsSource

        return DnsSource(source)
    if source.kind is SourceKind.KUBERNETES:
        from areal_weight_sync.discovery.kubernetes import KubernetesSource
        from areal_weight_sync.discovery.kubernetes_api import KubernetesApi

        return KubernetesSource(source, KubernetesApi(source.namespace, source.name))
    try:
        _, url = normalize_url(source.name)
    except InvalidInput as error:
        raise InvalidInput(f"endpoints.inference: {error}") from None
    return StaticSource(url)
