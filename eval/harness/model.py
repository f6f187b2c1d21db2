"""Patched models for EleutherAI's lm-evaluation-harness: its model type `hf_linattn`.

    import lm_eval
    from hf_linattn.eval.harness.model import LinattnLM

    lm_eval.simple_evaluate(model=LinattnLM("tuned"), tasks=["lambada_openai"])

Importing this file registers the type; it needs the package lm_eval, and changes nothing in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from transformers import PreTrainedModel

from hf_linattn import from_pretrained, is_patched, patch_model, unpatch_model
from hf_linattn.errors import CheckpointError, DataError, OptionError
from hf_linattn.patching.causality import require_causal
from hf_linattn.patching.loading import explain_missing, gguf_parts

from ..common.cli import json_object
from ..common.models import UNPATCHED
from ..common.nll import nan_refused, refuse_nan

NAME = "hf_linattn"
OTHER_LOADERS = ("delta", "autogptq", "gptqmodel", "gguf_file", "tp_plan")
"""Arguments of lm_eval's own class that load weights by other ways than `hf_linattn.from_pretrained`."""


@register_model(NAME)
class LinattnLM(HFLM):  # type: ignore[misc]  # lm_eval has no types
    """lm_eval's `hf` model, loaded by `hf_linattn.from_pretrained`, so that a patched folder keeps its patch.

    Everything else is lm_eval's: requests, tokenization, batches, truncation and scoring. What differs from
    its defaults: log-probabilities are taken in float32 (`softmax_dtype`), also from half-precision logits,
    and without `device` the model goes to an accelerator if there is one.

    Args:
        pretrained: folder or name of a model, patched or not, or a model in memory.
        patch: patch put on after loading; "unpatched" takes off the one that the folder has.
        options: options of the patch, as a dict or as the text of a JSON object.
        device: such as "cpu" or "cuda:1".
        softmax_dtype: precision of the log-probabilities; None is that of the logits.
        kwargs: those of lm_eval's HFLM: dtype, batch_size, max_length, tokenizer, add_bos_token, peft, ...

    Raises:
        OptionError: an argument of lm_eval that loads weights in another way, or one that has no use.
        CheckpointError: there is no model, or a damaged one.
        DataError: there is no tokenizer, or one without any token to begin with.
        UnsupportedModelError: the model sees later tokens (an encoder).
        LinattnError: the patch is unknown or does not suit the model.
    """

    AUTO_MODEL_CLASS: Any = None

    def __init__(
        self,
        pretrained: str | PreTrainedModel,
        patch: str | None = None,
        options: dict[str, Any] | str | None = None,
        device: str | None = None,
        softmax_dtype: str | torch.dtype | None = "float32",
        **kwargs: Any,
    ) -> None:
        if wrong := [name for name in OTHER_LOADERS if kwargs.get(name)]:
            raise OptionError(f"{wrong[0]} loads weights in a way that leaves patches out: --model hf has it")
        if patch is None and options:
            raise OptionError("options belong to a patch: give patch= as well")
        if patch is not None and not isinstance(pretrained, str):
            raise OptionError("patch= is for folders: a model in memory is patched with patch_model before")
        self.patch = patch
        self.options = json_object(options) if isinstance(options, str) else dict(options or {})
        device = _accelerator() if device is None else _checked_device(device)
        if isinstance(pretrained, str):
            pretrained, keyword = gguf_parts(pretrained)
            kwargs |= keyword
        super().__init__(pretrained, device=device, softmax_dtype=softmax_dtype, **kwargs)
        if self.prefix_token_id is None:
            raise DataError(
                "the tokenizer has neither BOS nor EOS, and the first token of a text needs one before it: "
                "name it with prefix_token_id="
            )
        if self.backend == "causal":
            require_causal(self.model)

    def _get_config(self, pretrained: str, **kwargs: Any) -> None:
        with explain_missing(f"no model at {pretrained!r}", CheckpointError):
            super()._get_config(pretrained, **kwargs)

    def _create_model(self, pretrained: str, **kwargs: Any) -> None:
        # lm_eval finds out where the model goes and puts adapters on it; only the loading is ours
        auto_class = self.AUTO_MODEL_CLASS
        self.AUTO_MODEL_CLASS = _Loader(auto_class, self.patch, self.options)
        try:
            super()._create_model(pretrained, **kwargs)
        finally:
            self.AUTO_MODEL_CLASS = auto_class

    def _create_tokenizer(self, pretrained: Any, tokenizer: Any, **kwargs: Any) -> None:
        source = tokenizer or pretrained
        with explain_missing(f"no tokenizer at {source!r}, name one with tokenizer=", DataError):
            super()._create_tokenizer(pretrained, tokenizer, **kwargs)
        names = ("pad_token_id", "unk_token_id", "eos_token_id")
        if all(getattr(self.tokenizer, name) is None for name in names):
            # lm_eval would add a token that the model has no embedding for; padding is masked, so any will do
            self.tokenizer.pad_token = self.tokenizer.bos_token or self.tokenizer.convert_ids_to_tokens(0)

    def tok_decode(self, tokens: Any, skip_special_tokens: bool = True) -> Any:
        """Decode token ids; None for None, which lm_eval asks for where the tokenizer has no EOS."""
        return None if tokens is None else super().tok_decode(tokens, skip_special_tokens)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> Any:
        """Continue every request, as lm_eval does.

        Raises:
            OptionError: a request leaves no room for its prompt.
        """
        for request in requests:
            new_tokens = request.args[1].get("max_gen_toks", self.max_gen_toks)
            if self.backend == "causal" and new_tokens >= self.max_length:
                raise OptionError(
                    f"task {request.task_name!r} generates up to {new_tokens} tokens, which leaves no room "
                    f"for a prompt in max_length {self.max_length}: raise max_length, or lower "
                    "max_gen_toks in the task or with gen_kwargs"
                )
        return super().generate_until(requests, disable_tqdm=disable_tqdm)

    # of NaN lm_eval makes an accuracy like any other: the first choice, or token 0, is the best

    def _loglikelihood_tokens(self, requests: list[Any], *args: Any, **kwargs: Any) -> Any:
        for _, _, tokens in requests:
            if not 0 < len(tokens) <= self.max_length:
                raise OptionError(
                    f"an answer to score has {len(tokens)} tokens, and can have 1 to max_length, which is "
                    f"{self.max_length}"
                )
        found = super()._loglikelihood_tokens(requests, *args, **kwargs)
        refuse_nan(torch.tensor([nats for nats, _ in found]), self.model)
        return found

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **kwargs: Any) -> Any:
        kwargs["logits_processor"] = [nan_refused(self.model)]
        return super()._model_generate(context, max_length, stop, **kwargs)


@dataclass(frozen=True)
class _Loader:
    """Stands where lm_eval expects an auto class of transformers."""

    auto_class: Any
    patch: str | None
    options: dict[str, Any]

    def from_pretrained(self, source: str, **kwargs: Any) -> Any:
        kwargs = {name: value for name, value in kwargs.items() if value not in (None, "", False)}
        with explain_missing(f"no model at {source!r}", CheckpointError):
            model = from_pretrained(source, auto_class=self.auto_class, **kwargs)
        if self.patch == UNPATCHED and is_patched(model):
            unpatch_model(model)
        elif self.patch not in (None, UNPATCHED):
            patch_model(model, self.patch, options=self.options)
        return model


def _accelerator() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return "cpu"
    # lm_eval knows cuda and mps by their bare names, others with a number only
    return accelerator.type if accelerator.type in ("cuda", "mps") else f"{accelerator.type}:0"


def _checked_device(name: str) -> str:
    """Refuse a device that is not there: lm_eval would silently take another one."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise OptionError(f"there is no device {name!r}: {str(error).splitlines()[0]}") from error
    return name
