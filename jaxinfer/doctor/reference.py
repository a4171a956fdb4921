"""The reference: a Hugging Face directory as transformers runs it, float32, on the CPU.

Knows: transformers' modules and hooks. The only file of the library that imports torch and transformers, and only when
it is asked to.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from jaxinfer.doctor.compare import Reference
from jaxinfer.doctor.forward import EMBEDDING, FINAL, LOGITS
from jaxinfer.errors import CheckpointError, ConfigError


def require_reference(directory: Path) -> None:
    """Raise ConfigError where torch or transformers is not installed, CheckpointError where `directory` holds no model.

    To be asked before anything takes time.
    """
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"the reference {directory} holds no config.json; expected a Hugging Face directory")
    try:
        import torch  # pyright: ignore[reportMissingImports]  # noqa: F401
        import transformers  # pyright: ignore[reportMissingImports]  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"a reference needs torch and transformers ({error}); run pip install 'jaxinfer[bench]'"
        ) from None


def run_reference(directory: Path, ids: Sequence[int]) -> Reference:
    """What each part of the model in `directory` makes of `ids`, and its weights.

    Raises CheckpointError where transformers cannot load the directory, has to make up a tensor, or has no decoder of
    the usual parts in it.
    """
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = _load(directory, torch.float32)
    with torch.inference_mode(), _recording(model) as made:
        logits = model(torch.tensor([list(ids)]), use_cache=False).logits
    parts = {name: value[0].float().numpy() for name, value in {**made, LOGITS: logits}.items()}
    return Reference(parts, {name: value.float().numpy() for name, value in _weights(model).items()})


def _load(directory: Path, dtype: Any) -> Any:
    from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    try:
        model, told = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, attn_implementation="eager", output_loading_info=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"transformers cannot load the reference {directory.name}: {reason:.300}") from error
    if missing := sorted(told["missing_keys"]):
        raise CheckpointError(f"the reference {directory.name} has no tensor {missing[0]}; transformers made it up")
    return model.eval()


def _weights(model: Any) -> dict[str, Any]:
    """The weights under the names of a checkpoint: transformers 5 joins some, such as experts, while it loads."""
    from transformers import core_model_loading  # pyright: ignore[reportMissingImports]

    return core_model_loading.revert_weight_conversion(model, model.state_dict())


@contextmanager
def _recording(model: Any) -> Iterator[dict[str, Any]]:
    """While the model runs, what its parts make is put into the dictionary, by our parts' names."""
    made: dict[str, Any] = {}

    def keep(name: str) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            made[name] = (output[0] if isinstance(output, tuple) else output).detach()

        return hook

    def enter(module: Any, inputs: Any, named: Any) -> None:
        made[EMBEDDING] = (inputs[0] if inputs else named["hidden_states"]).detach()

    with ExitStack() as hooks:
        layers, norm = _decoder(model)
        handles = [layers[0].register_forward_pre_hook(enter, with_kwargs=True)]
        for i, layer in enumerate(layers):
            handles.append(layer.self_attn.register_forward_hook(keep(f"block {i} attention output")))
            handles.append(layer.mlp.register_forward_hook(keep(f"block {i} MLP output")))
            handles.append(layer.register_forward_hook(keep(f"block {i} output")))
        handles.append(norm.register_forward_hook(keep(FINAL)))
        for handle in handles:
            hooks.callback(handle.remove)
        yield made


def _decoder(model: Any) -> tuple[Any, Any]:
    """The layers and the final norm. Raises CheckpointError where the model is not made of the usual parts."""
    try:
        layers, norm = model.model.layers, model.model.norm
        for layer in layers:
            _ = layer.self_attn, layer.mlp
    except AttributeError as error:
        raise CheckpointError(f"the reference is no decoder of attention and MLPs as we know them: {error}") from None
    return layers, norm
