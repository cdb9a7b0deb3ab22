"""Eight simulated devices for the whole suite: set before JAX starts its backend."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Eight devices wait for one another on however few cores there are: give them the time.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_cpu_collective_call_terminate_timeout_seconds=600"
)

import jax

jax.config.update("jax_num_cpu_devices", 8)
