"""Real shapes of paged decode attention, by name: tests cut their rows, benchmarks run them whole."""

from pallas_kernels.shapes import AttentionShape as Shape

SHAPES: dict[str, Shape] = {
    "smollm2-135m 1 x 128": Shape(1, 1, 128, 3, 3, 64),
    "smollm2-135m 8 x 1024": Shape(8, 1, 1024, 3, 3, 64),
    "smollm2-135m 32 x 128": Shape(32, 1, 128, 3, 3, 64),
    "smollm2-135m 32 x 1024": Shape(32, 1, 1024, 3, 3, 64),
    "gemma3-270m 8 x 1024, window 512": Shape(8, 1, 1024, 1, 4, 256, window=512),
    "gemma2-2b 4 x 512, softcap 50": Shape(4, 1, 512, 4, 2, 256, softcap=50.0),
    "phi2 4 x 512, head 80": Shape(4, 1, 512, 32, 1, 80),
    "phi3-mini 4 x 512, head 96": Shape(4, 1, 512, 32, 1, 96),
    "gpt-oss-20b 4 x 512, window 128, sinks": Shape(4, 1, 512, 8, 8, 64, window=128, sinks=True),
    "deepseek-v3 4 x 256, one plane": Shape(4, 1, 256, 1, 16, 576, planes=1),
    "llama3-8b 4 x 512, pages of 16": Shape(4, 1, 512, 8, 4, 128, page_size=16),
    "llama3-8b 16 x 1024, pages of 128": Shape(16, 1, 1024, 8, 4, 128, page_size=128),
}
