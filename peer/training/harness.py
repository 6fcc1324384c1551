"""Tasks of lm-evaluation-harness (the package `lm-eval`) on a model of a checkpoint.

The harness asks a model for the likelihood of continuations and for generated text. Requests are
computed one at a time with the model's own context; longer ones lose their beginning.

# T positions, V vocabulary
"""

from __future__ import annotations

import math
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll.peer.errors import SetupError
from atoll.peer.extras import extra
from atoll.peer.training import models
from atoll.peer.training.devices import Device
from atoll.peer.training.sampling import SamplingOptions, generate
from atoll.peer.training.trained import Trained

MAX_GENERATED = 256  # tokens, where a task states no limit: the harness's own default

Scores = dict[str, dict[str, float]]


def evaluate(
    trained: Trained,
    tasks: Sequence[str],
    *,
    device: Device,
    limit: int | None = None,
    folder: Path | None = None,
) -> Scores:
    """Return the metrics of each task by name.

    Args:
        trained: the model of a checkpoint; moved to the device and put in evaluation mode.
        tasks: names of tasks that the harness knows. Most of them fetch their data.
        device: device to compute on.
        limit: examples of each task; None for all.
        folder: where the YAML files of more tasks are. They may name code, so name only your own.

    Raises:
        ExtraMissing: `lm-eval` is not installed.
        SetupError: a task is unknown.
    """
    harness = extra("lm_eval", "--tasks")
    manager = extra("lm_eval.tasks", "--tasks").TaskManager(
        include_path=None if folder is None else str(folder)
    )
    unknown = [name for name in tasks if not manager.match_tasks([name])]
    if unknown or not tasks:
        raise SetupError(
            f"unknown task {unknown[0]!r}; `lm-eval ls tasks` lists the tasks, and --task-path "
            "adds your own"
            if unknown
            else "expected names of tasks after --tasks, got none"
        )
    found = harness.simple_evaluate(
        model=language_model(trained, device),
        tasks=list(tasks),
        limit=limit,
        task_manager=manager,
        bootstrap_iters=0,  # no standard errors: they take longer than a small task
    )
    return {task: _numbers(metrics) for task, metrics in found["results"].items()}


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that are numbers, without the name of the filter `none`."""
    return {
        name.removesuffix(",none"): float(value)
        for name, value in metrics.items()
        if type(value) in (int, float) and math.isfinite(value) and "stderr" not in name
    }


def language_model(trained: Trained, device: Device) -> Any:  # noqa: ANN401 - of an optional package
    """Return a model as the harness takes it, an instance of its class `TemplateLM`.

    Raises:
        ExtraMissing: `lm-eval` is not installed.
    """
    base = extra("lm_eval.api.model", "--tasks").TemplateLM
    return types.new_class("AtollLM", (_Answers, base))(Scorer(trained, device))


class _Answers:
    """The methods that `TemplateLM` leaves open."""

    def __init__(self, scorer: Scorer) -> None:
        super().__init__()
        self._scorer = scorer

    @property
    def eot_token_id(self) -> int:
        return self._scorer.start

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: object
    ) -> list[int]:
        return self._scorer.encode(string)

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], disable_tqdm: bool = False, **_: object
    ) -> list[tuple[float, bool]]:
        return [self._scorer.likelihood(context, more) for _, context, more in requests]

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        return [self._scorer.rolling(request.args[0]) for request in requests]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        return [self._scorer.continued(*request.args) for request in requests]


class Scorer:
    """Likelihoods and continuations of texts."""

    def __init__(self, trained: Trained, device: Device) -> None:
        """Move the model to the device and put it in evaluation mode."""
        self._model = trained.model.to(device.device).eval()
        self._tokenizer, self._device = trained.tokenizer, device
        self._context = trained.spec.data.seq_len
        self.start = trained.tokenizer.end_token or 0
        """Token before the beginning of a text."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return [int(token) for token in self._tokenizer.encode(text.encode())]

    @torch.no_grad()
    def likelihood(self, context: Sequence[int], more: Sequence[int]) -> tuple[float, bool]:
        """Return the log-likelihood in nats of tokens, and whether each is the most likely one.

        Args:
            context: the tokens before them; none begins a text.
            more: the tokens, at least one. If they are more than the model takes, they are scored
                in pieces, each after as many tokens as fit before it.
        """
        tokens = [*(context or [self.start]), *more]
        total, is_greedy, end = 0.0, True, len(tokens)
        first = end - len(more)
        while first < end:
            stop = min(end, first + self._context)
            begin = max(0, stop - 1 - self._context)
            scored_TV = self._log_chances(tokens[begin : stop - 1])[first - 1 - begin :]
            targets_T = torch.tensor(tokens[first:stop])
            total += float(scored_TV.gather(1, targets_T[:, None]).sum())
            is_greedy &= bool((scored_TV.argmax(1) == targets_T).all())
            first = stop
        return total, is_greedy

    def rolling(self, text: str) -> float:
        """Return the log-likelihood of a whole text, in nats; 0 of an empty one."""
        tokens = self.encode(text)
        return self.likelihood([], tokens)[0] if tokens else 0.0

    def continued(self, text: str, options: Mapping[str, Any]) -> str:
        """Return a continuation that ends before the first of the texts in `until`."""
        stops = options.get("until") or []
        stops = [stops] if isinstance(stops, str) else list(stops)
        drawn = SamplingOptions(
            max_tokens=int(options.get("max_gen_toks", MAX_GENERATED)),
            temperature=float(options.get("temperature", 0.0)) if options.get("do_sample") else 0.0,
        )
        made = ""
        for piece in generate(
            self._model,
            self._tokenizer,
            text,
            drawn,
            context=self._context,
            device=self._device,
        ):
            made += piece
            ends = [place for stop in stops if stop and (place := made.find(stop)) >= 0]
            if ends:
                return made[: min(ends)]
        return made

    def _log_chances(self, tokens: Sequence[int]) -> Tensor:
        tokens_1T = torch.tensor([list(tokens)], device=self._device.device)
        with self._device.autocast():
            logits_1TV = models.logits_of(self._model, tokens_1T)
        return torch.log_softmax(logits_1TV[0].float().cpu(), dim=-1)
