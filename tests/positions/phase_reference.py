"""References for the position functions: exact integers, and dense float64 loops."""

from fractions import Fraction

import numpy as np

PI = Fraction("3.14159265358979323846264338327950288419716939937510582097494459")
UNITS_A_RADIAN = Fraction(2**32) / (2 * PI)
RADIANS_A_UNIT = 2 * np.pi / 2**32
# What to_radians' own float32 costs, at an angle of up to pi.
FLOAT32_ANGLE = 4e-7


def units_off(turns: int, radians: float, times: int = 1) -> float:
    """How far `turns` is from the exact product `times * radians`, modulo one turn, in units."""
    off = (Fraction(int(turns)) - times * Fraction(float(radians)) * UNITS_A_RADIAN) % 2**32
    return float(min(off, 2**32 - off))


def angle_between(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The distance of two angles modulo one turn, in float64."""
    difference = np.asarray(a, np.float64) - np.asarray(b, np.float64)
    return np.abs((difference + np.pi) % (2 * np.pi) - np.pi)


def sum_matrix(starts: np.ndarray, valid: np.ndarray, inclusive: bool) -> np.ndarray:
    """[T, T], one row's: 1 where a token's phase (row) contains an increment (column)."""
    time = len(starts)
    matrix = np.zeros((time, time))
    for m in range(time):
        first = max((t for t in range(m + 1) if starts[t]), default=0)
        for t in range(first, m + 1 if inclusive else m):
            matrix[m, t] = valid[t]
    return matrix


def integer_sums(
    turns: np.ndarray, starts: np.ndarray, valid: np.ndarray, carry: np.ndarray, inclusive: bool
) -> tuple[np.ndarray, np.ndarray]:
    """(turns of each token, turns after the last) by a loop over uint32 [B, T, K, P]."""
    out = np.zeros_like(turns)
    running = carry.copy()
    for b in range(turns.shape[0]):
        for t in range(turns.shape[1]):
            if starts[b, t]:
                running[b] = 0
            before = running[b].copy()
            if valid[b, t]:
                running[b] += turns[b, t]
            out[b, t] = running[b] if inclusive else before
    return out, running


def rotated(x: np.ndarray, phases: np.ndarray, layout: str, scale: float = 1.0) -> np.ndarray:
    """x [B, T, H, N] times scale * exp(i phases [B, T, K, P]), in complex128."""
    x = np.asarray(x, np.float64)
    heads, kv_heads, pairs = x.shape[2], phases.shape[2], phases.shape[3]
    phases = np.broadcast_to(phases, (*x.shape[:2], kv_heads, pairs))
    out = x.copy()
    for h in range(heads):
        turn = scale * np.exp(1j * np.asarray(phases[:, :, h * kv_heads // heads], np.float64))
        for p in range(pairs):
            first, second = (p, p + pairs) if layout == "half" else (2 * p, 2 * p + 1)
            turned = (x[:, :, h, first] + 1j * x[:, :, h, second]) * turn[..., p]
            out[:, :, h, first], out[:, :, h, second] = turned.real, turned.imag
    return out


def carope_phases(
    x: np.ndarray,
    kernel: np.ndarray,
    bias: np.ndarray,
    pairs: int,
    *,
    exponent: str = "power",
    first_exponent: int = 0,
    inclusive: bool = True,
    factor: np.ndarray | None = None,
) -> np.ndarray:
    """CARoPE's phases [B, T, K, P] as the paper defines them, number by number in float64."""
    x, kernel, bias = (np.asarray(a, np.float64) for a in (x, kernel, bias))
    batch, time, _ = x.shape
    kv_heads = kernel.shape[1]
    phases = np.zeros((batch, time, kv_heads, pairs))
    for b in range(batch):
        for h in range(kv_heads):
            for p in range(pairs):
                running = 0.0
                for t in range(time):
                    column = (slice(None), h, p) if exponent == "free" else (slice(None), h)
                    logit = x[b, t] @ kernel[column] + bias[column[1:]]
                    f = 1 / (np.log(1 + np.exp(logit)) + 1)
                    if exponent == "power":
                        increment = f ** (p + first_exponent)
                    elif exponent == "free" and p == 0 and first_exponent == 0:
                        increment = 1.0
                    else:
                        increment = f
                    if factor is not None:
                        increment *= factor[p]
                    before, running = running, running + increment
                    phases[b, t, h, p] = running if inclusive else before
    return phases
