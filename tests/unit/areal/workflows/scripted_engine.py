"""An engine that answers what it is told, in the order of the requests."""

from tests.unit.areal.workflows.chat_families import end_of_turn, tokenizer

from areal.types import LLMResponse, StopReason


class ScriptedEngine:
    """`script`: for each request its answers, or the error that it raises."""

    def __init__(self, script, reward, family="qwen2.5"):
        self.tokenizer, self.end = tokenizer(family), end_of_turn(family)
        self.script, self.reward = list(script), reward
        self.requests, self.scored = [], []

    async def agenerate(self, request):
        [response] = await self.agenerate_group(request)
        return response

    async def agenerate_group(self, request):
        self.requests.append(request)
        answers = self.script.pop(0)
        if isinstance(answers, Exception):
            raise answers
        return [self._one(request, answer) for answer in answers]

    def _one(self, request, answer):
        ids = [*self.tokenizer.encode(answer, add_special_tokens=False), self.end]
        ones = [1.0] * len(ids)
        return LLMResponse(list(request.input_ids), ids, ones, [2] * len(ids), StopReason.STOP)

    async def score(self, reward_fn, *, completions, data, **more):
        self.scored += completions
        return [self.reward(completion, data) for completion in completions]

    def trained(self, trajectory):
        """The texts that the loss covers."""
        ids = trajectory.input_ids[trajectory.loss_mask].tolist()
        text = self.tokenizer.decode(ids)
        return text.removesuffix("<|im_end|>").split("<|im_end|>")
