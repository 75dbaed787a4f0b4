import pytest

from areal.errors import InvalidInput, Unavailable
from areal.tokenizer import Tokenizer
from areal.types import GenerationHyperparameters, LLMResponse, StopReason
from areal.workflows.rlvr import RLVRWorkflow
from areal_torch.models.tiny import ASSISTANT_ID, END_ID, SYSTEM_ID, USER_ID, make_byte_tokenizer
from areal_torch.models.tiny import CHAT_TEMPLATE as TEMPLATE


class Engine:
    """Answers "1", "2", … in turn; a score is the answer as a number."""

    def __init__(self, template=TEMPLATE):
        self.tokenizer = Tokenizer(
            make_byte_tokenizer(), chat_template=template, eos_token_ids=[END_ID]
        )
        self.requests, self.scored, self.fail = [], [], None

    async def agenerate_group(self, request):
        self.requests.append(request)
        return [
            LLMResponse(
                list(request.input_ids),
                [*b"%d" % number, END_ID],
                [-1.0] * 2,
                [5] * 2,
                StopReason.STOP,
            )
            for number in range(1, request.gconfig.n_samples + 1)
        ]

    async def score(self, reward_fn, **item):
        if self.fail is not None:
            raise self.fail
        self.scored.append((reward_fn, item))
        return [float(text) for text in item["completions"]]


def gconfig(n=3):
    return GenerationHyperparameters(n_samples=n, max_new_tokens=4)


async def test_rlvr_when_run_then_samples_a_group_and_scores_it_in_one_call():
    engine, row = Engine(), {"messages": [{"role": "user", "content": "1+1="}], "answer": "2"}
    group = await RLVRWorkflow("math", gconfig(), reward_kwargs={"x": 1}).arun_episode(engine, row)
    prompt = [USER_ID, *b"1+1=", ASSISTANT_ID]
    assert [r.input_ids for r in engine.requests] == [prompt]
    [(reward_fn, item)] = engine.scored
    assert reward_fn == "math"
    assert item == {
        "completions": ["1", "2", "3"],
        "data": row,
        "prompt": "<|user|>1+1=<|assistant|>",
        "prompt_ids": prompt,
        "completion_ids": [[b"123"[i], END_ID] for i in range(3)],
        "kwargs": {"x": 1},
    }
    assert [t.reward for t in group] == [1.0, 2.0, 3.0]
    assert [t.completion_text for t in group] == ["1", "2", "3"]
    assert group[2].input_ids.tolist() == [*prompt, *b"3", END_ID]
    assert group[2].token_versions.tolist() == [-1] * len(prompt) + [5, 5]


async def test_rlvr_when_row_has_a_prompt_then_it_is_the_users_message():
    engine = Engine()
    await RLVRWorkflow("math", gconfig(1), system_prompt="Add").arun_episode(
        engine, {"prompt": "7"}
    )
    assert engine.requests[0].input_ids == [SYSTEM_ID, *b"Add", USER_ID, *b"7", ASSISTANT_ID]


async def test_rlvr_when_there_is_no_chat_template_then_prompt_is_plain_text():
    engine = Engine(template=None)
    await RLVRWorkflow("math", gconfig(1), system_prompt="Add ").arun_episode(
        engine, {"prompt": "7"}
    )
    assert engine.requests[0].input_ids == list(b"Add 7")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "7"}, r"'messages' .* or 'prompt' .* got the fields \['question'\]"),
        ({"prompt": 7}, "'prompt' \\(a string\\)"),
        ({"messages": [{"content": "x"}]}, r"messages\[0\]"),
        ({"prompt": "a", "images": float("nan")}, "images: expected a list, got float nan"),
    ],
)
async def test_rlvr_when_the_row_is_malformed_then_names_it(row, message):
    with pytest.raises(InvalidInput, match=message):
        await RLVRWorkflow("math", gconfig()).arun_episode(Engine(), row)


async def test_rlvr_when_scoring_fails_then_raises_and_gives_no_reward():
    engine = Engine()
    engine.fail = Unavailable("reward worker died")
    with pytest.raises(Unavailable):
        await RLVRWorkflow("math", gconfig()).arun_episode(engine, {"prompt": "1"})


def test_rlvr_when_arguments_are_wrong_then_refused():
    with pytest.raises(InvalidInput, match="did you mean 'math'"):
        RLVRWorkflow("maths")
    with pytest.raises(InvalidInput, match="n_samples 0"):
        RLVRWorkflow("math", gconfig(0))
