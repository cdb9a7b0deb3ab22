import flax
import jax.numpy as jnp
import numpy as np
import pytest
from encoding_cases import quick_jit
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from carope_jax.layers import Rope
from carope_jax.positions import layout_permutation, rotate

LAYOUTS = ("half", "interleaved")
layouts = st.sampled_from(LAYOUTS)
rng = np.random.default_rng(0)
B, T, H = 2, 3, 4
compiled_rotate = quick_jit(rotate, static_argnames="layout")


@st.composite
def head_and_rotary_dims(draw):
    head_dim = draw(st.integers(2, 40))
    return head_dim, 2 * draw(st.integers(1, head_dim // 2))


def normal(*shape):
    return rng.normal(size=shape).astype(np.float32)


def turned_by_hand(x, phases, layout):
    """Pair by pair, in float64, as the layouts are described."""
    pairs, turned = phases.shape[-1], np.array(x, np.float64)
    for i in range(pairs):
        first, second = (i, i + pairs) if layout == "half" else (2 * i, 2 * i + 1)
        cos, sin = np.cos(phases[..., i]), np.sin(phases[..., i])
        a, b = x[..., first], x[..., second]
        turned[..., first], turned[..., second] = a * cos - b * sin, a * sin + b * cos
    return turned


@given(head_and_rotary_dims(), layouts, layouts)
def test_a_layout_brought_to_another_turns_alike(dims, source, target):
    head_dim, rotary_dim = dims
    there = layout_permutation(head_dim, source, target, rotary_dim)
    back = layout_permutation(head_dim, target, source, rotary_dim)
    x, phases = normal(B, T, H, head_dim), normal(1, T, 1, rotary_dim // 2)
    np.testing.assert_array_equal(there[back], np.arange(head_dim))
    np.testing.assert_array_equal(there[rotary_dim:], np.arange(rotary_dim, head_dim))
    np.testing.assert_array_equal(
        turned_by_hand(x[..., there], phases, target)[..., back], turned_by_hand(x, phases, source)
    )


# A new shape is a new compilation: the loop above has the dims, this ties the code to the loop.
@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=4, deadline=None)
@given(st.sampled_from([(2, 2), (7, 4)]), st.floats(0.5, 2.0))
def test_rotate_turns_the_layouts_pairs(layout, dims, scale):
    head_dim, rotary_dim = dims
    x, phases = normal(B, T, H, head_dim), normal(1, T, 1, rotary_dim // 2)
    expected = turned_by_hand(x, phases, layout)
    expected[..., :rotary_dim] *= scale
    ours = compiled_rotate(x, phases, layout=layout, scale=scale)
    np.testing.assert_allclose(ours, expected, atol=1e-5)


def test_scores_do_not_change_with_the_layout():
    q, k = normal(B, T, H, 8), normal(B, T, H, 8)
    places = layout_permutation(8, "half", "interleaved", 6)
    half = quick_jit(Rope(8, rotary_dim=6))(q, k)
    other = quick_jit(Rope(8, rotary_dim=6, layout="interleaved"))
    interleaved = other(q[..., places], k[..., places])
    scores = [np.einsum("BTHN,BSHN->BHTS", *map(np.asarray, x)) for x in (half, interleaved)]
    np.testing.assert_allclose(*scores, atol=1e-5)


@pytest.mark.skipif(
    not hasattr(nnx, "RoPE"), reason=f"flax {flax.__version__} has no nnx.RoPE; 0.12.12 has"
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_flax_turns_as_the_half_layout(layout):
    # Theirs is [..., T, N], its pairs (i, i + N/2), its base `theta`.
    x, places = normal(B, 50, H, 8), layout_permutation(8, layout, "half")
    theirs = nnx.RoPE(theta=500.0)(jnp.asarray(x[..., places]).swapaxes(1, 2)).swapaxes(1, 2)
    ours, _ = Rope(8, base=500.0, layout=layout)(jnp.asarray(x), jnp.asarray(x))
    np.testing.assert_allclose(ours[..., places], theirs, atol=1e-5)
