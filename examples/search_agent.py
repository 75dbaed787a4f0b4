"""Trains an agent that searches documents (SQLite's full-text search) before it answers.

    areal run examples/search_agent.py                  # trains on a laptop's CPU
    areal run examples/search_agent.py control=true     # control run: shuffled rewards

A question names a parcel ("ka7?"), and only the documents say in which bay the parcel is. The agent
asks the model. If the model writes `find QUERY`, the agent searches and shows it the best document;
any other text is the answer. The held-out questions are about parcels that are not in the training
rows, so the model must learn to search and to read, not to remember.
"""

import random
import sqlite3
import string
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import openai

from areal import (
    AgentWorkflow,
    FSDPPPOActor,
    GenerationHyperparameters,
    GRPOConfig,
    RemoteSGLangEngine,
    StatefulLoader,
    WeightUpdateMeta,
    load_expr_config,
    shuffle_rewards,
)
from areal.datasets.heldout import hold_out


@dataclass
class Config(GRPOConfig):
    """Keys of the experiment file: those of GRPOConfig, and the recipe's own."""

    control: bool = False
    """Control run: shuffle the rewards of each batch, so that accuracy cannot rise."""
    train_problems: int = 1000
    heldout_problems: int = 300
    warm_start_loss: float = 0.12
    """The warm-up ends at this loss, at which about three quarters of the answers are right."""
    warm_start_steps: int = 1500
    """The warm-up ends after this many steps at the latest."""


# -- the documents and the search --------------------------------------------------------------


def facts() -> dict[str, str]:
    """The bay of each of 1,300 parcels, {"ka7": "42", …}; the same in every process."""
    draw = random.Random(0)
    names = [f"{a}{b}{c}" for a in string.ascii_lowercase for b in "aeiou" for c in range(10)]
    return {name: f"{draw.randrange(100):02}" for name in names}


def document(parcel: str) -> str:
    return f"parcel {parcel} bay {facts()[parcel]}"


@cache
def index() -> sqlite3.Connection:
    """A full-text index over all documents, in this process's memory."""
    database = sqlite3.connect(":memory:", check_same_thread=False)
    database.execute("create virtual table documents using fts5(text)")
    database.executemany("insert into documents values (?)", [(document(p),) for p in facts()])
    return database


def search(query: str) -> str:
    """Returns the document that matches a query best (BM25)."""
    words = " ".join(f'"{word}"' for word in query.replace('"', " ").split())
    try:
        sql = "select text from documents where documents match ? order by rank limit 1"
        found = index().execute(sql, (words,)).fetchone()
    except (sqlite3.Error, UnicodeError):  # an empty query, or one that is not valid text
        found = None
    return found[0] if found else "nothing"


# -- the agent: imports nothing from areal ------------------------------------------------------


async def agent(client: openai.AsyncOpenAI, question: str) -> str:
    """Asks the model at most three times; returns its answer, or "" if it only searched."""
    messages = [{"role": "user", "content": question}]
    for _ in range(3):
        completion = await client.chat.completions.create(model="any", messages=messages)
        message = completion.choices[0].message
        text = (message.content or "").strip()
        if not text.startswith("find "):
            return text
        found = search(text.removeprefix("find "))
        messages += [message, {"role": "user", "content": found}]
    return ""


# -- what trains it ----------------------------------------------------------------------------


async def run(task, base_url, api_key):
    """Makes one attempt at a row and returns its reward. Runs in a rollout worker."""
    # The URL is plain HTTP: loading certificates would only cost 50 ms of CPU per attempt.
    http = openai.DefaultAsyncHttpxClient(verify=False)
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http) as client:
        return float(await agent(client, task["question"]) == task["answer"])


def problems(config: Config) -> tuple[list[dict], list[dict]]:
    """Train and held-out rows, of different parcels: {"question": "ka7?", "answer": "42"}."""
    rows = [{"question": f"{parcel}?", "answer": bay} for parcel, bay in facts().items()]
    random.Random(config.seed).shuffle(rows)
    train, heldout = hold_out(rows, config.heldout_problems, name="heldout_problems")
    return train[: config.train_problems], heldout


def main(argv):
    config, _ = load_expr_config(argv, Config)
    train, heldout = problems(config)

    rollout = RemoteSGLangEngine(config.rollout)
    actor = FSDPPPOActor(config.actor)
    workflow = AgentWorkflow(run, config.gconfig)
    max_new_tokens = config.gconfig.max_new_tokens
    one_run = AgentWorkflow(run, GenerationHyperparameters(max_new_tokens=max_new_tokens))
    dataloader = StatefulLoader(train, seed=config.seed)

    rollout.evaluate(heldout, one_run, name="heldout_before")
    for step in range(actor.get_version(), config.total_train_steps):
        batch = rollout.prepare_batch(dataloader, workflow=workflow)
        if config.control:
            shuffle_rewards(batch, seed=step)
        actor.compute_advantages(batch)
        actor.ppo_update(batch)
        actor.upload_weights(WeightUpdateMeta.from_disk())
    rollout.evaluate(heldout, one_run, name="heldout_after")


# -- model: created once, at the start ----------------------------------------------------------


def demonstrations(config: Config) -> list[tuple[list[dict], str]]:
    """Pairs of a chat and the model's next message: for each row the query, then the answer."""
    shown = []
    for row in problems(config)[0]:
        parcel = row["question"].removesuffix("?")
        question = {"role": "user", "content": row["question"]}
        query = {"role": "assistant", "content": f"find {parcel}"}
        found = {"role": "user", "content": document(parcel)}
        shown += [([question], query["content"]), ([question, query, found], row["answer"])]
    return shown


def prepare_model(config: Config) -> None:
    """Creates a Qwen2 of 0.6 M parameters that can search and read, but makes mistakes."""
    from areal.config.training import OptimizerConfig, TrainEngineConfig
    from areal.tokenizer import Tokenizer
    from areal_torch.engines.sft import FSDPLMEngine, pack_examples
    from areal_torch.models.tiny import make_tiny_model

    if (Path(config.model.path) / "model.safetensors").exists():
        return
    fresh = make_tiny_model(f"{config.model.path}-fresh", seed=config.seed)
    optimizer = OptimizerConfig(lr=2e-3, beta2=0.95, weight_decay=0, warmup_steps_proportion=0.05)
    engine = FSDPLMEngine(TrainEngineConfig(path=str(fresh), optimizer=optimizer))
    engine.initialize(total_train_steps=config.warm_start_steps)
    tokenizer, draw, loss = Tokenizer.load(fresh), random.Random(config.seed), 5.0
    examples = [
        (tokenizer.apply_chat_template(said), [*tokenizer.encode(says), tokenizer.eos_token_id])
        for said, says in demonstrations(config)
    ]
    for step in range(config.warm_start_steps):
        batch = draw.sample(examples, min(128, len(examples)))
        loss += 0.1 * (engine.train_lm(pack_examples(batch))["loss"] - loss)
        if step % 25 == 0:
            print(
                f"warm start, step {step}: loss {loss:.2f} (until {config.warm_start_loss})",
                flush=True,
            )
        if loss <= config.warm_start_loss:
            break
    engine.save(config.model.path)
    engine.destroy()
