"""The transformers side: our Hugging Face export in `Ernie4_5_MoeForCausalLM`, on CPU, with the settings that are fastest there.

Float32, `grouped_mm` experts, sdpa attention, one thread a core, fused AdamW; no `torch.compile`, under which transformers leaves
the float32 `grouped_mm` for a loop. The optional packages are imported in the worker's process only.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

# The lower bounds of the extra `compare`: what the figures were measured with.
REQUIRED = {"torch": (2, 13), "transformers": (5, 24)}
INSTALL = (
    "pip install -e '.[compare]' (on a machine without a GPU first: "
    "pip install torch --index-url https://download.pytorch.org/whl/cpu)"
)
# New tokens of a trial of settings, and how often each is tried.
TRIAL, TRIES = 32, 3
# Nothing is looked for on the network; tokenizers' threads would only wait.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def check_installed(required: Mapping[str, tuple[int, int]] = REQUIRED) -> None:
    """Refuses, before any work, to compare with what is not installed; imports nothing.

    Raises:
      ValueError: naming the packages that are missing or too old, and the command that installs them.
    """
    lacking = []
    for name, least in required.items():
        wanted = f"{name}>={least[0]}.{least[1]}"
        if importlib.util.find_spec(name) is None:
            lacking.append(f"{wanted} is not installed")
        else:
            found = metadata.version(name)
            if tuple(int(number) for number in found.split(".")[:2]) < least:
                lacking.append(f"{wanted} is needed, {found} is installed")
    if lacking:
        raise ValueError(f"--against transformers: {'; '.join(lacking)}; install with: {INSTALL}")


def load() -> None:
    """Imports the libraries, with one thread a core."""
    import torch
    from transformers import Ernie4_5_MoeForCausalLM  # noqa: F401
    from transformers.utils import logging

    torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()


class _Rival:
    """The loaded model; `options` hold `folder`, the export, and `tokens` [B, T]."""

    parts: Sequence[str]

    def __init__(self, options: Mapping[str, Any]) -> None:
        import torch
        import transformers

        self._model: Any = transformers.Ernie4_5_MoeForCausalLM.from_pretrained(
            options["folder"], dtype=torch.float32, attn_implementation="sdpa", experts_implementation="grouped_mm"
        )
        for parameter in self._model.parameters():
            # Else weights may lie in the mapped file, all of which then counts as resident.
            parameter.data = parameter.data.clone()
        self._tokens = torch.from_numpy(np.asarray(options["tokens"], np.int64))
        self.facts: dict[str, Any] = {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "threads": torch.get_num_threads(),
            "dtype": "float32",
            "experts_implementation": "grouped_mm",
            "attn_implementation": "sdpa",
        }


class Train(_Rival):
    """One optimiser step on the same batch, clipped and decayed as ours; returns the cross-entropy a token before the step.

    It is spared the router losses and the bias update that are in our step: less work for it, and at our default coefficients
    they change no loss that is compared.
    """

    parts = ("step",)

    def __init__(self, options: Mapping[str, Any]) -> None:
        import torch

        super().__init__(options)
        o = options["optimizer"]
        trained = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        groups: list[dict[str, Any]] = [
            {"params": [p for name, p in trained.items() if decayed(name)], "weight_decay": o["weight_decay"]},
            {"params": [p for name, p in trained.items() if not decayed(name)], "weight_decay": 0.0},
        ]
        self._clip_norm = o["clip_norm"]
        self._optimizer = torch.optim.AdamW(groups, lr=options["rate"], betas=(o["b1"], o["b2"]), eps=o["eps"], fused=True)
        self._model.train()
        self.facts |= {"optimizer": "AdamW(fused=True)", "parameters": sum(p.numel() for p in trained.values())}

    def run(self, part: str) -> float:
        """Forward, backward, update."""
        import torch

        # The model shifts the labels; the last token of a row predicts nothing.
        loss = self._model(input_ids=self._tokens, labels=self._tokens, use_cache=False).loss
        loss.backward()
        if self._clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._clip_norm, foreach=True)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())


def decayed(name: str) -> bool:
    """Whether weight decay applies to a parameter of transformers' name, as in our recipes: not to norms and biases."""
    return not any(part in name for part in ("norm", "bias"))


class Prefill(_Rival):
    """Reads the prompts into a cache; returns the logits [B, V] after each row's last token."""

    parts = ("prefill",)

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self._model.eval()

    def run(self, part: str) -> np.ndarray:
        """One pass."""
        import torch

        with torch.inference_mode():
            logits = self._model(input_ids=self._tokens, use_cache=True, logits_to_keep=1).logits
        return np.asarray(logits[:, -1].numpy())


class Decode(_Rival):
    """Greedy generation of 1 (`first`) and of `options["new"]` tokens (`all`) after the prompts; returns the new tokens [B, n].

    Which experts' implementation, cache and number of threads are fastest differs with the batch, so all are tried and the best
    is kept.
    """

    parts = ("first", "all")

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self._model.eval()
        # Nothing ends a row early.
        self._model.generation_config.eos_token_id = None
        self._lengths = {"first": 1, "all": int(options["new"])}
        trial = functools.partial(self._generate, min(self._lengths["all"], TRIAL))
        threads = sorted({1, int(self.facts["threads"])})
        # Not `batched_mm`: on CPU it copies the experts of every prompt token, gigabytes a layer, and is slower besides.
        choices = list(itertools.product(("grouped_mm", "eager"), ("dynamic", "static"), threads))
        seconds = dict.fromkeys(choices, float("inf"))
        # Whole calls, the prompt's time included: a difference of two could be noise, and noise would choose a slow rival.
        for choice in choices * TRIES:
            self._use(*choice)
            seconds[choice] = min(seconds[choice], _seconds(trial))
        self._use(*min(seconds, key=lambda choice: seconds[choice]))
        self.facts["trial_seconds"] = {", ".join(map(str, choice)): round(s, 4) for choice, s in seconds.items()}

    def run(self, part: str) -> np.ndarray:
        """One call of `generate`."""
        return np.asarray(self._generate(self._lengths[part])[:, self._tokens.shape[1] :].numpy())

    def _use(self, experts: str, cache: str, threads: int) -> None:
        import torch

        self._cache = cache
        self._model.set_experts_implementation(experts)
        torch.set_num_threads(threads)
        self.facts |= {"experts_implementation": experts, "cache": cache, "threads": threads}

    def _generate(self, new: int) -> torch.Tensor:
        import torch

        with torch.inference_mode():
            tokens: torch.Tensor = self._model.generate(
                input_ids=self._tokens,
                attention_mask=torch.ones_like(self._tokens),
                do_sample=False,
                max_new_tokens=new,
                cache_implementation=self._cache,
            )
        return tokens


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
