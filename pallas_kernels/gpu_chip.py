"""Which GPU a kernel is compiled for, as far as it matters here: Hopper is compute capability 9.0."""

import jax

HOPPER = (9, 0)


def require_hopper(*, or_newer: bool = False) -> None:
    """Raises NotImplementedError on a GPU that lacks what the kernel is made of; elsewhere there is nothing to ask.

    wgmma is Hopper's alone; asynchronous copies (TMA, cp.async.bulk) came with it and stayed.
    """
    if jax.default_backend() != "gpu":
        return
    has = jax.devices()[0].compute_capability
    version = tuple(int(part) for part in has.split("."))
    if version < HOPPER or (version > HOPPER and not or_newer):
        need = "9.0 or newer" if or_newer else "9.0 (Hopper) alone"
        raise NotImplementedError(f"a GPU of compute capability {has}; the kernel is for {need}")
