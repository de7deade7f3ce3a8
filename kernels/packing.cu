// Copies of many tensors in one launch, from one type to another, times a scale.
// SOURCE, TARGET: types; COPIES: how many fit the arguments; CHUNK: elements that a block takes at once.
#include "memory.cuh"

constexpr int V = 16 / (int)(sizeof(SOURCE) < sizeof(TARGET) ? sizeof(SOURCE) : sizeof(TARGET));

struct Arguments {
  const SOURCE* sources[COPIES];
  TARGET* targets[COPIES];
  long long counts[COPIES];
  int chunks[COPIES];  // of this copy and all before it
  int copy_count;
  float scale;
};
static_assert(sizeof(Arguments) == ARGUMENTS_BYTES, "Python packs other arguments");

extern "C" __global__ void __launch_bounds__(THREADS) copies(const __grid_constant__ Arguments a) {
  int c = 0;
  for (int chunk = blockIdx.x; chunk < a.chunks[a.copy_count - 1]; chunk += gridDim.x) {
    while (chunk >= a.chunks[c]) ++c;
    long long begin = (long long)(chunk - (c ? a.chunks[c - 1] : 0)) * CHUNK;
    long long count = a.counts[c] - begin;
    const SOURCE* from = a.sources[c] + begin;
    TARGET* into = a.targets[c] + begin;
    int head = unaligned<V>(from);
    share<V>(
        count < CHUNK ? count : CHUNK, head == unaligned<V>(into) ? head : V,
        [&](long long i) {
          float values[V];
          load(values, from + i);
#pragma unroll
          for (int k = 0; k < V; ++k) values[k] *= a.scale;
          store(into + i, values);
        },
        [&](long long i) { narrow(widen(from[i]) * a.scale, into[i]); });
  }
}
