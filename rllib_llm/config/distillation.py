"""Distillation: a teacher, and how far the policy may be from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from rllib_llm.config.sections import wrong
from rllib_llm.shared.dotted import named_model
from rllib_llm.shared.errors import Problem
from rllib_llm.shared.setting import IN_ENV, Condition, Section, Settings, is_set, setting, when

POLICY = "policy"  # the teacher of self-distillation
TAUGHT = when("distill_coeff", "is above 0", bool, "Set distill_coeff", ": nothing is distilled")
WHOLE = when(
    "distill_loss", "is 'divergence'", lambda kind: kind == "divergence",
    why=": it compares sampled tokens alone",
)  # fmt: skip
ITSELF = Condition(
    "teacher is 'policy'", lambda c: teacher_of(c).get("model") == POLICY,
    "with teacher={config.teacher!r}: it is frozen",
)  # fmt: skip
ELSEWHERE = when(
    "teacher_in", "is 'environment'", lambda place: place == "environment",
    why=": the whole vocabulary is compared",
)  # fmt: skip
MOVES = when("teacher_update_every", "is set", is_set, "Set it", ": the teacher is frozen")


class DistillationSettings(Settings):
    """A frozen teacher that says of the policy's own tokens what it would have written."""

    teacher: str | dict[str, Any] | None = setting(
        None, "the teacher: a folder, a hub id, or {model, quantization, dtype, device}",
        note='With teacher_in="environment" also {url: ..., model: ...}: a server with OpenAI\'s '
        "interface that gives prompt_logprobs (vLLM, `rllib serve`); and {column: ..., models: "
        "{NAME: ..., ...}}: several, of which a column of the prompts names one. "
        '"policy": the policy itself, as training began or as teacher_update_every says, which '
        "usually reads teacher_prompt. It must have the policy's vocabulary.", acts=(TAUGHT,),
        trl="teacher_model_name_or_path", also="teacher_model teacher_model_path ref_teacher",
    )  # fmt: skip
    teacher_in: Literal["learner", "environment"] = setting(
        "learner", "where the teacher is",
        note='"learner": a copy in each, whose whole distributions are compared; "environment": in '
        "every sampler, whose likeliest tokens travel with the completions.", acts=(TAUGHT,),
    )  # fmt: skip
    teacher_top_k: int = setting(
        16, "the likeliest tokens of a teacher in the environment, which are compared, and all "
        "others as one", least=1, most=256, acts=(TAUGHT, WHOLE, ELSEWHERE), trl="loss_top_k",
        also="distill_top_k topk",
    )  # fmt: skip
    teacher_prompt: str | None = setting(
        None, "the column of the prompts that the teacher reads instead of the prompt",
        note="Text or messages, such as the prompt with its solution (SDFT, OPSD); in "
        "conversations what stands before the first answer. None: the teacher reads what the "
        "policy reads.", place=IN_ENV,
    )  # fmt: skip
    distill_coeff: float = setting(
        0.0, "the weight of the distance to the teacher, beside the algorithm's own loss", least=0,
        short="coeff", also="distillation_loss_coef kd_coef opd_coef",
    )  # fmt: skip
    distill_loss: Literal["divergence", "policy_gradient"] = setting(
        "divergence", "the loss of distillation",
        note='"divergence": between distributions of the next token, at each token; '
        '"policy_gradient": log teacher - log policy of the sampled token is added to its '
        "advantage.", acts=(TAUGHT,), short="loss",
    )  # fmt: skip
    distill_beta: float = setting(
        1.0, "β of the generalised Jensen-Shannon divergence",
        note="0: KL(teacher || policy), as in SFT; 0.5: Jensen-Shannon; 1: KL(policy || teacher).",
        least=0, most=1, acts=(TAUGHT, WHOLE), short="beta",
    )  # fmt: skip
    teacher_update_every: int | None = setting(
        None, "the number of optimiser steps after which a teacher that is the policy follows it",
        note="None: it stays as training began.", unit="optimiser steps", least=1,
        acts=(TAUGHT, ITSELF),
    )  # fmt: skip
    teacher_update_mix: float = setting(
        0.05, "the policy's share in the moving average that is the teacher; 1: it is reset",
        above=0, most=1, acts=(TAUGHT, MOVES), also="ema_decay",
    )  # fmt: skip


DISTILLATION = Section.of("distillation", DistillationSettings)


def teacher_of(config: Any) -> dict[str, Any]:
    """The teacher's settings, {} without one."""
    return named_model(config.teacher) if config.teacher else {}


def distillation_rules(config: Any) -> Iterator[Problem]:
    """There is a teacher, where it can be."""
    is_outside = config.teacher_in == "environment"
    if not config.distill_coeff or (is_outside and config.envs):  # then entries have theirs
        return
    known = {"model", "quantization", "dtype", "device"} | ({"url"} if is_outside else set())
    teachers = {"teacher": (chosen := teacher_of(config))}
    if "models" in chosen:
        models = chosen["models"]
        is_whole = isinstance(models, Mapping) and models and isinstance(chosen.get("column"), str)
        if not is_outside or not is_whole or chosen.keys() - {"column", "models"}:
            yield Problem("teacher", "be {column: COLUMN, models: {NAME: MODEL, ...}}, with "
                          "teacher_in='environment'", "the column of the prompts names each "
                          "row's teacher, and samplers alone know it", "", chosen)  # fmt: skip
            return
        teachers = {f"teacher.models.{name}": named_model(each) for name, each in models.items()}
    for place, teacher in teachers.items():
        if not teacher.get("model"):
            yield Problem(place, "name a model", "the policy is to come near to it",
                          "Write `teacher: FOLDER`, or 'policy' with teacher_prompt",
                          config.teacher)  # fmt: skip
            return
        for name in teacher.keys() - known - ({"backend", "batch_tokens"} if is_outside else set()):
            remedy = "Set teacher_in='environment'" if name == "url" else "Leave it out"
            yield Problem(f"{place}.{name}", f"be one of {sorted(known)}",
                          f"it is no setting of a teacher in the {config.teacher_in}", remedy,
                          teacher[name])  # fmt: skip
        if is_outside and teacher["model"] == POLICY:
            yield wrong(config, "teacher_in", "'learner' with teacher='policy'",
                        "only learners have the policy's weights as they were",
                        "Use teacher_in='learner'")  # fmt: skip
        if "url" in teacher and config.temperature != 1:
            yield wrong(config, "temperature", "1 with a teacher on a server",
                        "a server gives log-probs at 1", "Use a teacher by its folder")  # fmt: skip
    if config.teacher_update_every and config.lora is not None:
        yield wrong(config, "teacher_update_every", "None with lora",
                    "the teacher is the trunk without its adapters")  # fmt: skip
