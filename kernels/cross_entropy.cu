// The local steps of vocabulary-parallel cross-entropy. A block processes one row of logits, which may have any length
// and any alignment, because a vocabulary is rarely a multiple of 16 bytes.
// TYPE: type of the logits.
#include "block.cuh"
#include "memory.cuh"

constexpr int V = 16 / (int)sizeof(TYPE);

struct Arguments {
  TYPE* logits;  // [rows, columns]; `gradient` overwrites them
  float* maximum;
  float* sums;  // [2, rows]
  const long long* targets;
  const float* grad;  // gradient of the loss, [rows]
  long long vocab_start;
  long long rows;
  long long columns;
};
static_assert(sizeof(Arguments) == ARGUMENTS_BYTES, "Python packs other arguments");

// Calls each(logit) with every logit of a row in fp32; the threads of a block share the row.
template <class Each>
__device__ inline void share_row(const TYPE* logits, long long columns, Each each) {
  share<V>(
      columns, unaligned<V>(logits),
      [&](long long i) {
        float values[V];
        load(values, logits + i);
#pragma unroll
        for (int k = 0; k < V; ++k) each(values[k]);
      },
      [&](long long i) { each(widen(logits[i])); });
}

extern "C" __global__ void __launch_bounds__(THREADS) maxima(const __grid_constant__ Arguments a) {
  for (long long row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const TYPE* logits = a.logits + row * a.columns;
    float most = -infinity();
    share_row(logits, a.columns, [&](float logit) { most = larger(most, logit); });
    most = reduce<Larger>(most);
    if (threadIdx.x == 0) a.maximum[row] = most;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) sums(const __grid_constant__ Arguments a) {
  for (long long row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const TYPE* logits = a.logits + row * a.columns;
    const float most = a.maximum[row];
    float sum = 0.0f;
    share_row(logits, a.columns, [&](float logit) { sum += exponential<TYPE>(logit - most); });
    sum = reduce<Add>(sum);
    if (threadIdx.x == 0) {
      const long long target = a.targets[row] - a.vocab_start;
      const bool here = target >= 0 && target < a.columns;
      a.sums[row] = sum;
      a.sums[a.rows + row] = here ? widen(logits[target]) - most : 0.0f;
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) gradient(const __grid_constant__ Arguments a) {
  for (long long row = blockIdx.x; row < a.rows; row += gridDim.x) {
    TYPE* logits = a.logits + row * a.columns;
    const float most = a.maximum[row], grad = a.grad[row], factor = grad / a.sums[row];
    const long long target = a.targets[row] - a.vocab_start;
    share<V>(
        a.columns, unaligned<V>(logits),
        [&](long long i) {
          float values[V];
          load(values, logits + i);
#pragma unroll
          for (int k = 0; k < V; ++k)
            values[k] = exponential<TYPE>(values[k] - most) * factor - (i + k == target ? grad : 0.0f);
          store(logits + i, values);
        },
        [&](long long i) {
          float value = exponential<TYPE>(widen(logits[i]) - most) * factor - (i == target ? grad : 0.0f);
          narrow(value, logits[i]);
        });
  }
}
