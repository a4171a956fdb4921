"""Real shapes of paged prefill attention, by name: tests and benchmarks share them."""

from pallas_kernels.shapes import AttentionShape as Shape

SHAPES: dict[str, Shape] = {
    "smollm2-135m 512": Shape(1, 512, 512, 3, 3, 64),
    "smollm2-135m last chunk of 2048": Shape(1, 512, 2048, 3, 3, 64),
    "gemma3-270m last chunk of 1024, window 512": Shape(1, 512, 1024, 1, 4, 256, window=512),
    "gemma2-2b 256, softcap 50": Shape(1, 256, 256, 4, 2, 256, softcap=50.0),
    "gemma2-9b 512, softcap 50": Shape(1, 512, 512, 8, 2, 256, softcap=50.0),
    "phi2 128, head 80": Shape(1, 128, 128, 32, 1, 80),
    "phi3-mini 128, head 96": Shape(1, 128, 128, 32, 1, 96),
    "gpt-oss-20b last chunk of 512, window 128, sinks": Shape(1, 256, 512, 8, 8, 64, window=128, sinks=True),
    "gpt-oss-20b 256, sinks": Shape(1, 256, 256, 8, 8, 64, sinks=True),
    "deepseek-v3 last chunk of 128, one plane": Shape(1, 64, 128, 1, 16, 576, planes=1),
    "llama3-8b 32 of 160, pages of 16": Shape(1, 32, 160, 8, 4, 128, page_size=16),
    "llama3-8b last chunk of 1024, pages of 128": Shape(1, 512, 1024, 8, 4, 128, page_size=128),
}
