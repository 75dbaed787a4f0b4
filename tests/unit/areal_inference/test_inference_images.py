"""Images in the CPU engine: against transformers' own forward pass and processor."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests.unit.areal_torch.engines.hub_families import IMAGE, VISION_START, make_family
from transformers import AutoModelForImageTextToText, Qwen2VLImageProcessorPil

from areal.errors import InvalidInput
from areal_inference.api import Limits, RequestError, SchemaError, parse_generate
from areal_inference.decode.runner import ModelRunner
from areal_inference.decode.scheduler import Scheduler
from areal_inference.model.config import ModelConfig, ModelError
from areal_inference.model.kv_cache import KVCache
from areal_inference.model.transformer import Model
from areal_inference.model.vision import See, make_see
from areal_inference.model.weights import load_weights


def picture(width: int, height: int, seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()


def url(file: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"


TALL, SQUARE = picture(8, 16, 1), picture(16, 16, 2)
PROMPT = [5, VISION_START, IMAGE, 6, 7, VISION_START, IMAGE, 8, 9]


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_family(request.param, tmp_path_factory.mktemp(request.param), seed=3)
    Qwen2VLImageProcessorPil(
        patch_size=4, size={"shortest_edge": 64, "longest_edge": 1024}
    ).save_pretrained(made)
    return made


class Engine:
    """A scheduler on a model that sees."""

    def __init__(self, folder: Path) -> None:
        self.config = ModelConfig.from_folder(folder)
        see = make_see(folder, self.config)
        assert see is not None
        self.see: See = see
        self.limits = Limits.of(self.config, 128, 4096)
        weights = load_weights(str(folder), self.config, torch.float32)
        runner = ModelRunner(
            Model(self.config, weights, 128),
            KVCache(self.config, torch.float32, max_rows=8, max_length=128),
            max_total_tokens=4096,
            max_prefill_tokens=1024,
            seed=0,
        )
        self.scheduler = Scheduler(
            runner, max_running=8, max_prefill_tokens=1024, weight_version="0"
        )

    def generate(self, ids: list[int], files: list[bytes], count: int = 6, n: int = 1) -> list:
        body = {
            "input_ids": ids,
            "image_data": [url(file) for file in files],
            "return_logprob": True,
            "logprob_start_len": -1 if n > 1 else 0,  # such a prompt is computed alone
            "sampling_params": {"max_new_tokens": count, "n": n, "ignore_eos": True},
        }
        call = parse_generate(body, self.limits, None, self.see)
        for request in call.requests:
            self.scheduler.submit(request)
        with torch.inference_mode():
            while any(request.finish is None for request in call.requests):
                self.scheduler.step()
        return call.requests


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine(folder)


def theirs(folder: Path, ids: list[int], files: list[bytes]) -> torch.Tensor:
    """transformers' logprobs of all tokens but the first."""
    hf = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    process = Qwen2VLImageProcessorPil.from_pretrained(folder)
    found = process(images=[Image.open(io.BytesIO(f)) for f in files], return_tensors="pt")
    tokens = torch.tensor([ids])
    with torch.no_grad():
        logits = hf(
            input_ids=tokens,
            use_cache=False,
            mm_token_type_ids=(tokens == IMAGE).int(),
            **found,
        ).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]


@pytest.mark.parametrize("files", [[TALL, SQUARE], [SQUARE, TALL]], ids=["tall", "square"])
def test_generate_when_the_prompt_has_images_then_logprobs_are_those_of_transformers(
    folder: Path, engine: Engine, files: list[bytes]
) -> None:
    (request,) = engine.generate(PROMPT, files)
    assert request.input_ids.count(IMAGE) == 6, "an image of 8 x 16 fills 2 tokens, the other 4"
    expected = theirs(folder, request.input_ids + request.output_ids, files)
    found = torch.tensor([*request.input_logprobs, *request.logprobs])
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


def test_generate_when_prompts_differ_in_their_images_alone_then_nothing_is_shared(
    folder: Path, engine: Engine
) -> None:
    other = picture(16, 16, 7)
    body = {
        "input_ids": [PROMPT, PROMPT, [5, 6, 7]],
        "image_data": [[url(TALL), url(SQUARE)], [url(TALL), url(other)], []],
        "sampling_params": {"max_new_tokens": 4, "ignore_eos": True},
        "return_logprob": True,
    }
    requests = parse_generate(body, engine.limits, None, engine.see).requests
    for request in requests:
        engine.scheduler.submit(request)
    with torch.inference_mode():
        while any(request.finish is None for request in requests):
            engine.scheduler.step()
    for request, files in zip(requests, ([TALL, SQUARE], [TALL, other]), strict=False):
        assert request.cached_tokens == 0
        expected = theirs(folder, request.input_ids + request.output_ids, files)[-4:]
        torch.testing.assert_close(torch.tensor(request.logprobs), expected, atol=2e-5, rtol=0)


def test_generate_when_several_samples_are_asked_for_then_the_prompt_is_computed_once(
    folder: Path, engine: Engine
) -> None:
    requests = engine.generate(PROMPT, [TALL, SQUARE], n=3)
    assert sorted(r.cached_tokens > 0 for r in requests) == [False, True, True]
    for request in requests:
        expected = theirs(folder, request.input_ids + request.output_ids, [TALL, SQUARE])[-6:]
        torch.testing.assert_close(torch.tensor(request.logprobs), expected, atol=2e-5, rtol=0)


def test_weights_when_loaded_then_the_towers_are_checked_like_all_others(
    folder: Path, engine: Engine
) -> None:
    weights = engine.scheduler.runner.model.weights  # type: ignore[attr-defined]
    tower = [name for name in weights.checksums() if name.startswith("visual.")]
    assert len(tower) > 20
    assert weights.tower is not None


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"image_data": [url(TALL)]}, InvalidInput, "2 image tokens .* expected 1, one for each"),
        ({"image_data": ["http://host/x.png"] * 2}, RequestError, "fetches nothing"),
        ({"image_data": ["data:image/png;base64,?"] * 2}, SchemaError, "not base64"),
        ({"image_data": [url(TALL[:40])] * 2}, InvalidInput, r"image_data\[0\]: cannot be read"),
        ({"input_ids": [5, IMAGE, IMAGE]}, InvalidInput, "end with an image"),
    ],
)
def test_generate_when_images_are_wrong_then_one_line_says_so(
    engine: Engine, change: dict, error: type[Exception], said: str
) -> None:
    body = {"input_ids": PROMPT, "image_data": [url(TALL), url(SQUARE)], **change}
    with pytest.raises(error, match=said):
        parse_generate(body, engine.limits, None, engine.see)


def test_generate_when_the_model_sees_nothing_then_images_are_refused(engine: Engine) -> None:
    body = {"input_ids": PROMPT, "image_data": [url(TALL), url(SQUARE)]}
    with pytest.raises(RequestError, match="this model does not take images"):
        parse_generate(body, engine.limits, None)


def test_model_when_it_has_no_processor_then_one_line_says_so(tmp_path: Path) -> None:
    bare = make_family("qwen2_vl", tmp_path)
    with pytest.raises(ModelError, match="no image processor"):
        make_see(bare, ModelConfig.from_folder(bare))
