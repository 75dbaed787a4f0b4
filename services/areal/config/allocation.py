"""Allocation strings: how many inference servers and trainer ranks, and how ranks share a model.

sglang:d4t2+fsdp:d8t2c2e4
│ │       │ │ │ └ experts are spread over 4 ranks
│ │       │ │ └── a sequence's tokens are spread over 2 ranks inside attention (Ulysses)
│ │       │ └──── each matrix is spread over 2 ranks (tensor parallelism)
│ │       └────── 8 shares of a batch; with `s4`: sharded over 4 of them, 2 copies
│ └────────────── GPUs of a server
└──────────────── servers

With `|` in place of `+`, servers and trainer use the same GPUs; `auto` lets the launcher choose.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from areal.errors import ConfigError

AUTO = "auto"
"""`allocation_mode` for which the launcher puts one that suits the GPUs and the model."""
_FORM = "'d8', 'd16s8' or 'd8t2c2e4'"


@dataclass(frozen=True)
class Layout:
    """How a model and a batch are spread over the trainer's ranks."""

    data: int = 1
    """Shares of a batch."""
    shard: int = 1
    """Shares of a batch whose ranks shard the weights between them; other ranks have copies."""
    tensor: int = 1
    """Ranks that share each matrix; they get the same share of a batch."""
    context: int = 1
    """Ranks that share the tokens of a micro-batch; they get the same share of a batch."""
    experts: int = 1
    """Ranks that share the experts of a layer."""

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Parse `d8`, `d16s8`, `d8t2c2e4`.

        Raises:
            ConfigError: the string has another form, or its numbers do not divide each other.
        """
        sizes = _sizes(text, "dstcep", f"trainer layout {text!r}", _FORM)
        layout = cls(
            data=sizes["d"],
            shard=sizes.get("s", sizes["d"]),
            tensor=sizes.get("t", 1),
            context=sizes.get("c", 1),
            experts=sizes.get("e", 1),
        )
        if layout.data % layout.shard:
            raise ConfigError(
                f"trainer layout {text!r}: expected s to divide d: {layout.data} / {layout.shard} "
                "is not a whole number"
            )
        copy = layout.per_copy
        if copy % layout.experts:
            raise ConfigError(
                f"trainer layout {text!r}: expected e to divide the number of ranks that share one "
                f"copy of the weights, {layout.shard} x c{layout.context} x t{layout.tensor} = "
                f"{copy}: {copy} / {layout.experts} is not a whole number"
            )
        return layout

    def __str__(self) -> str:
        """The shortest string that is parsed to this."""
        shard = "" if self.shard == self.data else f"s{self.shard}"
        others = {"t": self.tensor, "c": self.context, "e": self.experts}
        return f"d{self.data}{shard}" + "".join(f"{k}{n}" for k, n in others.items() if n > 1)

    @property
    def plain(self) -> bool:
        """Whether each rank has its own share of batch and weights, without other parallelism."""
        return self == Layout(self.data, self.data)

    @property
    def ranks(self) -> int:
        """The number of trainer ranks."""
        return self.data * self.per_share

    @property
    def per_share(self) -> int:
        """Number of ranks that get the same share of a batch; they are consecutive."""
        return self.context * self.tensor

    @property
    def per_copy(self) -> int:
        """Ranks that share one copy of the weights."""
        return self.shard * self.per_share

    @property
    def averaged(self) -> int:
        """Ranks whose tokens differ: gradients are averaged over them."""
        return self.data * self.context

    def check_world(self, ranks: int) -> None:
        """Compare the layout with the actual number of ranks.

        Raises:
            ConfigError: there are more or fewer.
        """
        if ranks != self.ranks:
            product = f"d{self.data} x t{self.tensor} x c{self.context}"
            raise ConfigError(
                f"trainer layout '{self}': {product} = {self.ranks} ranks, but {ranks} were started"
            )

    def check_compiled(self) -> None:
        """Check that layers with this layout can be compiled.

        Raises:
            ConfigError: torch.compile cannot trace matrices that are spread over ranks.
        """
        if self.tensor > 1:
            raise ConfigError(
                f"trainer layout '{self}': actor.kernels=compile cannot trace layers spread over "
                f"t: expected a layout without t, such as d{self.ranks}, or kernels=eager"
            )

    def check_model(self, heads: int, kv_heads: int, experts: int) -> None:
        """Compare the layout with a model's sizes.

        Args:
            heads: number of attention heads.
            kv_heads: number of heads of keys and values.
            experts: number of experts in a layer; 0 if it has none.

        Raises:
            ConfigError: ranks cannot share them evenly.
        """
        for name, count in (("heads", heads), ("key and value heads", kv_heads)):
            if count % self.per_share:
                raise ConfigError(
                    f"trainer layout '{self}': {count} {name} over t{self.tensor} x "
                    f"c{self.context} = {self.per_share} ranks: {count} / {self.per_share} is "
                    "not a whole number"
                )
        if self.experts > 1 and not experts:
            raise ConfigError(f"trainer layout '{self}': expected no e: the model has no experts")
        if experts % self.experts:
            raise ConfigError(
                f"trainer layout '{self}': {experts} experts over e{self.experts} ranks: "
                f"{experts} / {self.experts} is not a whole number"
            )


def _sizes(text: str, letters: str, what: str, form: str) -> dict[str, int]:
    """Returns the number behind each letter; p is left out, since it can only be 1."""
    if re.fullmatch(rf"([{letters}][0-9]{{1,6}})+", text) is None:
        raise ConfigError(f"{what}: expected e.g. {form}")
    parts = re.findall(r"([a-z])(\d+)", text)
    sizes = {letter: int(number) for letter, number in parts}
    if len(sizes) < len(parts):
        raise ConfigError(f"{what}: expected each letter once")
    if sizes.get("d", 0) < 1:
        raise ConfigError(f"{what}: needs d1 or more")
    if sizes.pop("p", 1) != 1:
        raise ConfigError(f"{what}: expected p1, because there is no pipeline parallelism")
    if zero := [letter for letter, size in sizes.items() if size < 1]:
        raise ConfigError(f"{what}: {zero[0]}0: expected 1 or more")
    return sizes


class Sharing(StrEnum):
    """Whether servers and trainer use the same GPUs, and how."""

    APART = "apart"
    """`+`: each has GPUs of its own."""
    FITTING = "fitting"
    """`|`: the launcher puts `shared` if both fit into the memory, else `alternating`."""
    SHARED = "shared"
    """`|…@shared`: both keep their part of the memory, and work at the same time."""
    ALTERNATING = "alternating"
    """`|…@alternating`: servers release their memory while the trainer computes."""

    @property
    def together(self) -> bool:
        """Whether they use the same GPUs."""
        return self is not Sharing.APART


@dataclass(frozen=True)
class Allocation:
    """A parsed allocation string."""

    inference_replicas: int
    """0: the trainer learns from dataset rows only, and no service is started."""
    layout: Layout
    """Layout of the trainer's ranks."""
    inference_gpus: int = 1
    """GPUs of each inference server: its tensor parallelism."""
    sharing: Sharing = Sharing.APART
    chosen: bool = True
    """False: `auto`, for which the launcher puts another."""

    def __str__(self) -> str:
        """The shortest string that is parsed to this."""
        if not self.chosen:
            return AUTO
        if not self.inference_replicas:
            return f"fsdp:{self.layout}"
        width = f"t{self.inference_gpus}" if self.inference_gpus > 1 else ""
        join = "|" if self.sharing.together else "+"
        how = f"@{self.sharing}" if self.sharing in _WAYS else ""
        return f"sglang:d{self.inference_replicas}{width}{join}fsdp:{self.layout}{how}"

    @property
    def trainer_ranks(self) -> int:
        return self.layout.ranks

    @property
    def gpus(self) -> int:
        """GPUs of servers and trainer in all, where each server and each rank uses some."""
        servers = self.inference_replicas * self.inference_gpus
        return self.layout.ranks + (0 if self.sharing.together else servers)


def of_ranks(
    ranks: int, servers: int = 1, width: int = 1, sharing: Sharing = Sharing.APART
) -> Allocation:
    """Return an allocation in which each trainer rank has its own share of the batch.

    Args:
        ranks: number of trainer ranks.
        servers: number of inference servers.
        width: GPUs of each server.
        sharing: whether both use the same GPUs.
    """
    return Allocation(servers, Layout(ranks, ranks), width, sharing)


_HOW = r"(?:@(?P<how>\w*))?"
_TODAY = re.compile(r"sglang:(?P<gen>[dpt\d]+)(?P<join>[+|])fsdp:(?P<train>[a-z\d]+)" + _HOW)
_SEED = re.compile(r"sglang\.(?P<gen>[dpt\d]+)(?P<join>[+|])(?P<train>[a-z\d]+)" + _HOW)
_TRAINER_ALONE = re.compile(r"(?P<gen>)(?P<join>)fsdp:(?P<train>[a-z\d]+)(?P<how>)")
_WAYS = (Sharing.SHARED, Sharing.ALTERNATING)


def parse_allocation(text: str) -> Allocation:
    """Parse `sglang:d12t2+fsdp:d8t2`, `sglang.d12p1t1+d4p1t1`, or `fsdp:d8` (only a trainer).

    With `|` in place of `+`, both use the same GPUs, so there must be as many of each. `@shared` or
    `@alternating` at the end says how, instead of the launcher.

    Returns:
        For `auto`, one server and one rank, with `chosen` false.

    Raises:
        ConfigError: the string has another form, asks for pipeline parallelism, or its numbers do
            not divide each other.
    """
    if text == AUTO:
        return Allocation(1, Layout(), chosen=False)
    match = _TODAY.fullmatch(text) or _SEED.fullmatch(text) or _TRAINER_ALONE.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"allocation_mode {text!r}: expected e.g. 'sglang:d2+fsdp:d1', "
            "'sglang:d4t2+fsdp:d8t2c2e4', 'sglang:d1|fsdp:d1' for both on the same GPUs, "
            "'sglang.d12p1t1+d4p1t1', 'fsdp:d1' without servers, or 'auto'"
        )
    servers = {"d": 0}
    if given := match["gen"]:
        servers = _sizes(given, "dpt", f"allocation_mode {text!r}: servers {given!r}", "'d4t2'")
    try:
        layout = Layout.parse(match["train"])
    except ConfigError as error:
        raise ConfigError(f"allocation_mode {text!r}: {error}") from None
    replicas, width = servers["d"], servers.get("t", 1)
    sharing = _sharing(text, match["join"] or "+", match["how"])
    if sharing.together and replicas * width != layout.ranks:
        raise ConfigError(
            f"allocation_mode {text!r}: with '|' servers and trainer use the same GPUs: expected "
            f"as many for servers ({replicas} x {width} = {replicas * width}) as trainer ranks "
            f"({layout.ranks})"
        )
    return Allocation(replicas, layout, width, sharing)


def _sharing(text: str, join: str, how: str | None) -> Sharing:
    if how and join == "+":
        raise ConfigError(
            f"allocation_mode {text!r}: '@{how}': expected '|' in place of '+', because with '+' "
            "servers and trainer have GPUs of their own"
        )
    if how is None or join == "+":
        return Sharing.FITTING if join == "|" else Sharing.APART
    if how not in _WAYS:
        raise ConfigError(
            f"allocation_mode {text!r}: '@{how}': expected @shared, @alternating, or nothing for "
            "the one that fits"
        )
    return Sharing(how)
