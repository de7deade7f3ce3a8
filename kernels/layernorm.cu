// Layer norm or RMS norm. A block processes one row, of which each thread has ITEMS groups of WIDTH elements in
// registers, so that the row is read once. Statistics are fp32; the variance is that of differences to the mean.
// TYPE: type of rows; WEIGHT: type of weight and bias; CENTRED: 1 for layer norm, 0 for RMS norm without mean and bias;
// BACKWARD: 0 or 1; WIDTH, ITEMS: WIDTH * ITEMS * THREADS >= columns, and WIDTH is a divisor of columns.
#include "block.cuh"
#include "memory.cuh"

constexpr int V = WIDTH;

struct Arguments {
  const TYPE* x;
  const TYPE* grad;
  TYPE* y;  // dx in backward
  const WEIGHT* weight;
  const WEIGHT* bias;
  float* mean;
  float* rstd;
  float* partials;  // [1 + CENTRED, blocks, columns]: part of each block in the gradients of weight and bias
  long long rows;
  int columns;
  float epsilon;
};
static_assert(sizeof(Arguments) == ARGUMENTS_BYTES, "Python packs other arguments");

__device__ inline int column(int item) { return (item * THREADS + (int)threadIdx.x) * V; }

#if !BACKWARD
// The minimum of one block per multiprocessor keeps the assembler from spilling registers to fit another block.
extern "C" __global__ void __launch_bounds__(THREADS, 1) forward(const __grid_constant__ Arguments a) {
  for (long long row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const TYPE* x = a.x + row * a.columns;
    float values[ITEMS][V];
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      if (column(i) >= a.columns) continue;
      load(values[i], x + column(i));
#pragma unroll
      for (int k = 0; k < V; ++k) sum += values[i][k];
    }
    const float mean = CENTRED ? reduce<Add>(sum) / (float)a.columns : 0.0f;
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      if (column(i) >= a.columns) continue;
#pragma unroll
      for (int k = 0; k < V; ++k) {
        values[i][k] -= mean;
        squares += values[i][k] * values[i][k];
      }
    }
    float rstd = rsqrtf(reduce<Add>(squares) / (float)a.columns + a.epsilon);
    if (threadIdx.x == 0) {
      if (CENTRED) a.mean[row] = mean;
      a.rstd[row] = rstd;
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      if (column(i) >= a.columns) continue;
      float weight[V], bias[V] = {};
      load(weight, a.weight + column(i));
      if (CENTRED) load(bias, a.bias + column(i));
#pragma unroll
      for (int k = 0; k < V; ++k) values[i][k] = values[i][k] * rstd * weight[k] + bias[k];
      store(a.y + row * a.columns + column(i), values[i]);
    }
  }
}
#else
// dx = rstd (g w - mean(g w) - xhat mean(g w xhat)), without mean(g w) for RMS norm; g is grad, w weight, xhat the
// normalised x. A block sums the gradients of weight and bias over its rows, and `column_sums` adds the blocks' sums.
extern "C" __global__ void __launch_bounds__(THREADS) backward(const __grid_constant__ Arguments a) {
  float dweight[ITEMS][V] = {}, dbias[ITEMS][V] = {};
  for (long long row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const long long start = row * a.columns;
    const float mean = CENTRED ? a.mean[row] : 0.0f, rstd = a.rstd[row];
    float xhat[ITEMS][V], grad[ITEMS][V];
    float sums[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      if (column(i) >= a.columns) continue;
      load(xhat[i], a.x + start + column(i));
      load(grad[i], a.grad + start + column(i));
      float weight[V];
      load(weight, a.weight + column(i));
#pragma unroll
      for (int k = 0; k < V; ++k) {
        xhat[i][k] = (xhat[i][k] - mean) * rstd;
        dweight[i][k] += grad[i][k] * xhat[i][k];
        dbias[i][k] += grad[i][k];
        grad[i][k] *= weight[k];
        sums[0] += grad[i][k];
        sums[1] += grad[i][k] * xhat[i][k];
      }
    }
    reduce<Add>(sums);
    const float of_grad = CENTRED ? sums[0] / (float)a.columns : 0.0f, of_product = sums[1] / (float)a.columns;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      if (column(i) >= a.columns) continue;
#pragma unroll
      for (int k = 0; k < V; ++k) grad[i][k] = rstd * (grad[i][k] - of_grad - xhat[i][k] * of_product);
      store(a.y + start + column(i), grad[i]);
    }
  }
  float* of_weight = a.partials + (long long)blockIdx.x * a.columns;
  float* of_bias = of_weight + (long long)gridDim.x * a.columns;
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    if (column(i) >= a.columns) continue;
    store(of_weight + column(i), dweight[i]);
    if (CENTRED) store(of_bias + column(i), dbias[i]);
  }
}
#endif
