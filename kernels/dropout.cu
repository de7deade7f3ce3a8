// Bias, dropout and residual: y = residual + mask (x + bias) / (1 - p). The mask comes from the random bits of
// `random.py`, which depend only on key, row in the global batch and column, so that every layout drops the same
// elements. TYPE: type of x, residual and gradients; BIAS: type of bias; HAS_BIAS, HAS_RESIDUAL, DROP: 0 or 1; WIDTH:
// columns per thread, a divisor of all columns.
#include "columns.cuh"
#include "memory.cuh"

constexpr int V = WIDTH;

struct Arguments {
  const TYPE* x;  // gradient of y in backward
  const BIAS* bias;
  const TYPE* residual;
  TYPE* y;                 // dx in backward
  float* partials;         // [at_once, columns]: each thread's sums of dx
  const long long* device_key;  // [2]: mix(key) and first sample, read at each replay of a CUDA graph; null: `key`
  unsigned long long key;  // mix(key)
  long long origin;        // number of row 0 of x in the global batch; with `device_key`, for first sample 0
  unsigned rows, positions;  // number of rows of x, and number of rows per sample
  long long seq;           // number of rows between samples in the global batch
  int split, jump;         // row numbers are larger by `jump` from row `split` of each sample on
  int columns, at_once;    // `at_once`: number of rows that the grid processes at once
  int threshold;  // elements with smaller random bits are dropped
  float scale;
};
static_assert(sizeof(Arguments) == ARGUMENTS_BYTES, "Python packs other arguments");

struct Words { unsigned low, high; };

__device__ inline Words hash(long long index, unsigned long long key) {
  constexpr unsigned long long M = 0xD6E8FEB86659FD93ull;
  unsigned long long z = key + (unsigned long long)index * 0x9E3779B97F4A7C15ull;
  z = (z ^ z >> 32) * M;
  z = (z ^ z >> 32) * M;
  z ^= z >> 32;
  return {(unsigned)z, (unsigned)(z >> 32)};
}

struct Mask {
  unsigned long long key;
  long long origin;
  unsigned low[V], even[V];  // words of the thread's columns

  __device__ Mask(const Arguments& a, int column) : key(a.key), origin(a.origin) {
    if (!DROP) return;
    if (a.device_key) {
      key = (unsigned long long)a.device_key[0];
      origin += a.device_key[1] * a.seq;
    }
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const Words words = hash(-1 - (long long)(column + k), key);
      low[k] = words.low, even[k] = words.high & ~1u;
    }
  }

  // Multiplies retained values by the scale, and replaces dropped values, even inf and NaN, by 0.
  __device__ void apply(const Arguments& a, unsigned row, float (&values)[V]) const {
    const unsigned position = row % a.positions;
    const int further = position >= (unsigned)a.split ? a.jump : 0;
    const Words words = hash(origin + row / a.positions * a.seq + position + further, key);
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const int bits = (int)((words.low + low[k]) * ((words.high | 1u) ^ even[k]));
      values[k] = bits >= a.threshold ? values[k] * a.scale : 0.0f;
    }
  }
};

// The minimum of one block per multiprocessor keeps the assembler from spilling registers to fit another block.
extern "C" __global__ void __launch_bounds__(THREADS, 1) forward(const __grid_constant__ Arguments a) {
  const Place at = place(a.columns, V, a.at_once);
  if (at.idle) return;
  const Mask mask(a, at.column);
  float bias[V] = {};
  if (HAS_BIAS) load(bias, a.bias + at.column);
#pragma unroll 2
  for (long long row = at.row; row < a.rows; row += a.at_once) {
    const long long start = row * a.columns + at.column;
    float values[V], residual[V] = {};
    load(values, a.x + start);
    if (HAS_RESIDUAL) load(residual, a.residual + start);
#pragma unroll
    for (int k = 0; k < V; ++k) values[k] += bias[k];
    if (DROP) mask.apply(a, (unsigned)row, values);
#pragma unroll
    for (int k = 0; k < V; ++k) values[k] += residual[k];
    store(a.y + start, values);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) backward(const __grid_constant__ Arguments a) {
  const Place at = place(a.columns, V, a.at_once);
  if (at.idle) return;
  const Mask mask(a, at.column);
  float sums[V] = {};
#pragma unroll 2
  for (long long row = at.row; row < a.rows; row += a.at_once) {
    const long long start = row * a.columns + at.column;
    float values[V];
    load(values, a.x + start);
    mask.apply(a, (unsigned)row, values);
#pragma unroll
    for (int k = 0; k < V; ++k) sums[k] += values[k];
    store(a.y + start, values);
  }
  if (HAS_BIAS) store(a.partials + at.row * a.columns + at.column, sums);
}
