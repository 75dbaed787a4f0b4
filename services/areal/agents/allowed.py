"""The fields of each route's requests: what is honored, what is ignored; all else is refused.

A field that is ignored changes nothing that an agent could rely on, or belongs to the recipe, which
decides how tokens are sampled. The lists are in docs/agents.md, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from areal.errors import InvalidInput, did_you_mean

_SAMPLING = (
    "temperature top_p top_k min_p seed frequency_penalty presence_penalty repetition_penalty"
)
_ACCOUNT = (
    "model user metadata service_tier safety_identifier prompt_cache_key prompt_cache_retention"
)


@dataclass(frozen=True)
class Fields:
    """The fields of one route."""

    honored: frozenset[str]
    ignored: frozenset[str]
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Unsupported fields, and the values with which they change nothing."""

    def check(self, body: Mapping[str, Any], where: str = "") -> None:
        """Raises InvalidInput for a field that would be ignored without a word; null is absent."""
        for name, value in body.items():
            if value is None or name in self.honored or name in self.ignored:
                continue
            allowed = self.only.get(name, ())
            if not any(value == each and type(value) is type(each) for each in allowed):
                shown, known = str(value)[:80], self.honored | self.only.keys()
                hint = "" if name in self.only else did_you_mean(name[:80], known)
                raise InvalidInput(
                    f"{where}{name[:80]} {shown!r}: not supported; leave it out{hint}"
                )


def _fields(honored: str, ignored: str, **only: tuple[Any, ...]) -> Fields:
    return Fields(frozenset(honored.split()), frozenset(ignored.split()), only)


CHAT = _fields(
    "messages tools tool_choice parallel_tool_calls response_format n stop max_tokens "
    "max_completion_tokens logprobs stream stream_options return_token_ids chat_template_kwargs "
    "continue_final_message add_generation_prompt",
    f"{_SAMPLING} {_ACCOUNT} store reasoning_effort verbosity include_reasoning",
    logit_bias=({},),
    modalities=(["text"],),
    function_call=("none", "auto"),
    functions=([],),
    top_logprobs=(0,),
    stop_token_ids=([],),
    min_tokens=(0,),
    ignore_eos=(False,),
    skip_special_tokens=(True,),
    echo=(False,),
    best_of=(1,),
)
COMPLETIONS = _fields(
    "prompt n stop max_tokens logprobs stream stream_options",
    f"{_SAMPLING} {_ACCOUNT}",
    logit_bias=({},),
    echo=(False,),
    suffix=("",),
    best_of=(1,),
    stop_token_ids=([],),
    min_tokens=(0,),
    ignore_eos=(False,),
    skip_special_tokens=(True,),
)
RESPONSES = _fields(
    "input instructions tools tool_choice parallel_tool_calls text previous_response_id store "
    "max_output_tokens include stream chat_template_kwargs",
    f"{_SAMPLING} {_ACCOUNT} reasoning stream_options client_metadata max_tool_calls",
    background=(False,),
    truncation=("disabled",),
    top_logprobs=(0,),
    context_management=([],),
)
MESSAGES = _fields(
    "messages system tools tool_choice max_tokens stop_sequences stream output_config "
    "output_format chat_template_kwargs",
    "model temperature top_p top_k metadata thinking service_tier context_management "
    "cache_control betas inference_geo speed",
    mcp_servers=([],),
)
TOKENS = _fields(
    "token_ids sampling_params",
    "model request_id priority cache_salt kv_transfer_params",
    features=({},),
    stream=(False,),
)
SAMPLING_PARAMS = _fields(
    "n max_tokens stop",
    f"{_SAMPLING} logprobs prompt_logprobs flat_logprobs skip_special_tokens detokenize "
    "spaces_between_special_tokens include_stop_str_in_output output_kind "
    "routed_experts_prompt_start skip_reading_prefix_cache skip_clone",
    stop_token_ids=([],),
    min_tokens=(0,),
    ignore_eos=(False,),
    logit_bias=({},),
    bad_words=([],),
    extra_args=({},),
    thinking_token_budget=(),
)
REWARD = _fields("reward parts completion_id", "")
# Inside of requests. Clients send back what answers had, most of it null or empty.
MESSAGE = _fields(
    "role content name tool_calls tool_call_id reasoning_content reasoning thinking prefix partial",
    "cache_control provider_specific_fields",
    refusal=("",),
    annotations=([],),
    images=([],),
)
CALL = _fields("id type function", "index cache_control provider_specific_fields")
FUNCTION = _fields("name arguments", "")
PART = _fields("type text", "id cache_control annotations citations logprobs")
STREAM_OPTIONS = _fields("include_usage", "include_obfuscation", continuous_usage_stats=(False,))
ITEMS = {
    "message": _fields("type role content", "id status phase"),
    "function_call": _fields("type call_id name arguments", "id status caller"),
    "function_call_output": _fields("type call_id output", "id status caller"),
    "reasoning": _fields("type summary content", "id status encrypted_content"),
}
"""The items of responses, by type."""
TURN = _fields("role content", "")
BLOCKS = {
    "text": PART,
    "thinking": _fields("type thinking", "signature cache_control"),
    "redacted_thinking": _fields("type", "data cache_control"),  # no one but Anthropic reads it
    "tool_use": _fields("type id name input", "cache_control caller"),
    "tool_result": _fields("type tool_use_id content is_error", "cache_control"),
}
"""The blocks of Anthropic's messages, by type."""
ROUTES = {
    "/chat/completions": CHAT,
    "/completions": COMPLETIONS,
    "/generate": TOKENS,
    "/messages": MESSAGES,
    "/messages/count_tokens": MESSAGES,
    "/responses": RESPONSES,
    "/reward": REWARD,
}
