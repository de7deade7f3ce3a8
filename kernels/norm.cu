// Sum of the squares of many tensors: each block of `partial` computes one partial sum, and `total` adds these sums.
// TYPE: type of the elements; TENSORS: maximum number of tensors per launch; CHUNK: elements per block and iteration.
#include "block.cuh"
#include "memory.cuh"

constexpr int V = 16 / (int)sizeof(TYPE);

struct Arguments {
  const TYPE* tensors[TENSORS];
  long long counts[TENSORS];
  int chunks[TENSORS];  // number of chunks in this tensor and all preceding tensors
  int tensor_count;
  int partial_count;
  double* partials;  // partial sums of this launch; for `total`, of all launches
  float* result;
};
static_assert(sizeof(Arguments) == ARGUMENTS_BYTES, "Python packs other arguments");

// Squares are fp32, so that they overflow like those of other fp32 norms. Sums of chunks are added in fp64, because an
// fp32 sum of billions of equal numbers stops growing.
__device__ inline double block_sum(double value) {
  __shared__ double of_thread[THREADS];
  of_thread[threadIdx.x] = value;
  __syncthreads();
  for (int half = THREADS / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) of_thread[threadIdx.x] += of_thread[threadIdx.x + half];
    __syncthreads();
  }
  return of_thread[0];
}

extern "C" __global__ void __launch_bounds__(THREADS) partial(const __grid_constant__ Arguments a) {
  double sum = 0.0;
  int t = 0;
  for (int chunk = blockIdx.x; chunk < a.chunks[a.tensor_count - 1]; chunk += gridDim.x) {
    while (chunk >= a.chunks[t]) ++t;
    long long begin = (long long)(chunk - (t ? a.chunks[t - 1] : 0)) * CHUNK;
    long long count = a.counts[t] - begin;
    const TYPE* from = a.tensors[t] + begin;
    float squares[V] = {};
    share<V>(
        count < CHUNK ? count : CHUNK, unaligned<V>(from),
        [&](long long i) {
          float values[V];
          load(values, from + i);
#pragma unroll
          for (int k = 0; k < V; ++k) squares[k] += values[k] * values[k];
        },
        [&](long long i) {
          float value = widen(from[i]);
          squares[0] += value * value;
        });
    float of_chunk = 0.0f;
#pragma unroll
    for (int k = 0; k < V; ++k) of_chunk += squares[k];
    sum += of_chunk;
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) a.partials[blockIdx.x] = sum;
}

extern "C" __global__ void __launch_bounds__(THREADS) total(const __grid_constant__ Arguments a) {
  double sum = 0.0;
  for (int i = threadIdx.x; i < a.partial_count; i += THREADS) sum += a.partials[i];
  sum = block_sum(sum);
  if (threadIdx.x == 0) *a.result = (float)sum;
}
