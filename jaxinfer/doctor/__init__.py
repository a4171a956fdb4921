"""Why a model answers as it does: its configuration, its tensors, a run, and a comparison with another implementation.

`tensors` looks at the numbers of a checkpoint, `forward` runs our decoder and keeps what its parts made, `reference`
does the same in transformers, and `compare` finds the first part, and in it the first tensor, that differs. Only
`reference` imports torch and transformers.
"""
