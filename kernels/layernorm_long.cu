// Layer norm or RMS norm of rows that exceed the registers of a block (see `layernorm.cu`). `forward` reads a row three
// times, the second and third time from caches. Backward reads x and grad twice: `means` computes two numbers per row,
// and `gradients`, in which a thread has the same columns of many rows, computes all gradients.
// TYPE: type of rows; WEIGHT: type of weight and bias; CENTRED: 1 for layer norm, 0 for RMS norm without mean and bias;
// WIDTH: columns that a thread processes at once, a divisor of all columns.
#include "block.cuh"
#include "columns.cuh"
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
  float* means;     // [2, rows]: row means of grad * weight (0 for RMS norm) and of grad * weight * xhat
  float* partials;  // [1 + CENTRED, at_once, columns]: each thread's sums for the gradients of weight and bias
  long long rows;
  int columns;
  int at_once;  // number of rows that the grid of `gradients` processes at once
  float epsilon;
};
static_assert(sizeof(Arguments) == ARGUMENTS_BYTES, "Python packs other arguments");

// Calls each(column) for the first column of every group of V columns of the thread. The loop is not unrolled, because
// few registers per thread allow more threads, which use the memory bandwidth better.
template <class Each>
__device__ inline void along_row(int columns, Each each) {
#pragma unroll 1
  for (int column = (int)threadIdx.x * V; column < columns; column += THREADS * V) each(column);
}

extern "C" __global__ void __launch_bounds__(THREADS, 4) forward(const __grid_constant__ Arguments a) {
  for (long long row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const TYPE* x = a.x + row * a.columns;
    float sum = 0.0f, squares = 0.0f;
    if (CENTRED)
      along_row(a.columns, [&](int column) {
        float values[V];
        load(values, x + column);
#pragma unroll
        for (int k = 0; k < V; ++k) sum += values[k];
      });
    const float mean = CENTRED ? reduce<Add>(sum) / (float)a.columns : 0.0f;
    along_row(a.columns, [&](int column) {
      float values[V];
      load(values, x + column);
#pragma unroll
      for (int k = 0; k < V; ++k) squares += (values[k] - mean) * (values[k] - mean);
    });
    const float rstd = rsqrtf(reduce<Add>(squares) / (float)a.columns + a.epsilon);
    if (threadIdx.x == 0) {
      if (CENTRED) a.mean[row] = mean;
      a.rstd[row] = rstd;
    }
    along_row(a.columns, [&](int column) {
      float values[V], weight[V], bias[V] = {};
      load(values, x + column);
      load(weight, a.weight + column);
      if (CENTRED) load(bias, a.bias + column);
#pragma unroll
      for (int k = 0; k < V; ++k) values[k] = (values[k] - mean) * rstd * weight[k] + bias[k];
      store(a.y + row * a.columns + column, values);
    });
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 4) means(const __grid_constant__ Arguments a) {
  for (long long row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const long long start = row * a.columns;
    const float mean = CENTRED ? a.mean[row] : 0.0f, rstd = a.rstd[row];
    float sums[2] = {0.0f, 0.0f};
    along_row(a.columns, [&](int column) {
      float x[V], grad[V], weight[V];
      load(x, a.x + start + column);
      load(grad, a.grad + start + column);
      load(weight, a.weight + column);
#pragma unroll
      for (int k = 0; k < V; ++k) {
        grad[k] *= weight[k];
        sums[0] += grad[k];
        sums[1] += grad[k] * ((x[k] - mean) * rstd);
      }
    });
    reduce<Add>(sums);
    if (threadIdx.x == 0) {
      a.means[row] = CENTRED ? sums[0] / (float)a.columns : 0.0f;
      a.means[a.rows + row] = sums[1] / (float)a.columns;
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 4) gradients(const __grid_constant__ Arguments a) {
  const Place at = place(a.columns, V, a.at_once);
  if (at.idle) return;
  float weight[V], dweight[V] = {}, dbias[V] = {};
  load(weight, a.weight + at.column);
  for (long long row = at.row; row < a.rows; row += a.at_once) {
    const long long start = row * a.columns + at.column;
    const float mean = CENTRED ? a.mean[row] : 0.0f, rstd = a.rstd[row];
    const float of_grad = a.means[row], of_product = a.means[a.rows + row];
    float x[V], grad[V];
    load(x, a.x + start);
    load(grad, a.grad + start);
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const float xhat = (x[k] - mean) * rstd;
      dweight[k] += grad[k] * xhat;
      dbias[k] += grad[k];
      grad[k] = rstd * (grad[k] * weight[k] - of_grad - xhat * of_product);
    }
    store(a.y + start, grad);
  }
  float* of_weight = a.partials + at.row * a.columns + at.column;
  store(of_weight, dweight);
  if (CENTRED) store(of_weight + (long long)a.at_once * a.columns, dbias);
}
