"""Does context move the phases usefully past the training length, or is it the base, the noise, or
the parameters?

    python -m carope_jax.study run configs/studies/extrapolation.py --workdir runs/study

Ten core arms (three learning rates each, three seeds) and twelve others, all of them the
quickstart's model trained on 2.5M tokens at 128 tokens; `docs/study.md` says how they are compared.
"""

import dataclasses
import runpy
from pathlib import Path
from typing import Any

from carope_jax.study import (
    PER_LENGTH,
    Arm,
    Explanation,
    Measurement,
    Need,
    Question,
    Study,
    Variant,
    frozen_like,
    mean_bases,
)
from carope_jax.training import CheckpointConfig, Experiment

_quickstart: Experiment = runpy.run_path(str(Path(__file__).parent.with_name("quickstart.py")))[
    "experiment"
]

base = dataclasses.replace(
    _quickstart,
    name="extrapolation",
    # 1,220 updates of 2,048 tokens.
    data=dataclasses.replace(_quickstart.data, batch_size=16),
    optimizer=dataclasses.replace(_quickstart.optimizer, warmup_steps=60),
    training=dataclasses.replace(_quickstart.training, steps=1220, log_every=61, tensorboard=False),
    checkpoint=CheckpointConfig(every=305, keep=1),
)

# What the trained weights are evaluated as beside themselves.
shuffled = Variant("shuffled", {"model.carope.control": "shuffled"})
mean = Variant("mean", {"model.carope.control": "mean"})
carope_linear = Variant(
    "linear",
    {"model.carope.scaling.rule": "linear", "model.carope.scaling.factor": PER_LENGTH},
)
rope_scaled = tuple(
    Variant(
        rule,
        {"model.rope.scaling.rule": rule, "model.rope.scaling.factor": PER_LENGTH, **more},
    )
    for rule, more in (
        ("linear", {}),
        ("ntk", {}),
        ("yarn", {"model.rope.scaling.original_length": base.data.length}),
    )
)


def rope(**options: Any) -> dict[str, Any]:
    """Overrides of a RoPE arm."""
    return {"model.position": "rope"} | {f"model.rope.{k}": v for k, v in options.items()}


def carope(**options: Any) -> dict[str, Any]:
    """Overrides of a CARoPE arm."""
    return {"model.position": "carope"} | {f"model.carope.{k}": v for k, v in options.items()}


def other(name: str, overrides: dict[str, Any], need: Need | None = None) -> Arm:
    """Two seeds at `rope`'s best rate."""
    return Arm(name, overrides, group="others", seeds=(0, 1), rate_of="rope", need=need)


arms = (
    Arm("rope", rope(), variants=rope_scaled),
    Arm("carope_paper", carope(init="paper"), variants=(shuffled, mean, carope_linear)),
    Arm("rope_matched", rope(base="carope")),
    Arm("carope_frozen", carope(control="frozen"), need=Need("carope_paper", frozen_like)),
    Arm("rope_gate", rope() | {"model.value_gate": True}),
    Arm("carope_rope", carope(init="rope"), variants=(shuffled, mean, carope_linear)),
    Arm("carope_bias", carope(init="rope", control="constant")),
    Arm(
        "carope_embedding",
        carope(init="rope", source="embedding"),
        variants=(shuffled, mean),
    ),
    Arm("nope", {"model.position": "nope"}),
    Arm("alibi", {"model.position": "alibi"}),
    other("carope_shared", carope(init="paper", exponent="shared")),
    other("carope_free", carope(init="rope", exponent="free")),
    other("carope_first_1", carope(init="paper", first_exponent=1)),
    other("carope_paper_embedding", carope(init="paper", source="embedding")),
    other("rope_5e5", rope(base=5e5)),
    other("rope_mean_bases", rope(), Need("carope_paper", mean_bases)),
    other("selective_rope", {"model.position": "selective_rope"}),
    other("darope", {"model.position": "darope"}),
    other("hope", {"model.position": "hope"}),
    other("fox", {"model.position": "fox"}),
    other("learned", {"model.position": "learned"}),
    other("sinusoidal", {"model.position": "sinusoidal"}),
)


def question(subject: str) -> Question:
    """Is it ahead of RoPE, and what explains that?"""
    return Question(
        subject=subject,
        baseline="rope",
        explanations=(
            Explanation("base", ("rope_matched",)),
            Explanation("noise", ("carope_frozen", f"{subject}+shuffled")),
            Explanation("parameters", ("rope_gate",)),
        ),
    )


study = Study(
    name="extrapolation",
    base=base,
    arms=arms,
    rates=(2e-3, 5e-3, 1.2e-2),
    measurement=Measurement(multiples=(1, 2, 4, 8, 16), max_anchors=256),
    questions=(question("carope_paper"), question("carope_rope")),
)
