// Distribution of a matrix over threads, in which a thread has the same columns of many rows, so that it loads or
// computes the data of its columns (bias, random words, sums) once.
#pragma once

struct Place {
  int column;  // first column of the thread
  long long row;  // first row of the thread
  bool idle;  // whether the thread has no row
};

// Returns the first columns and row of this thread, which has `width` columns. The grid processes `at_once` rows at a
// time, so the thread's next row is `at_once` rows further. Adjacent threads have adjacent columns.
__device__ inline Place place(int columns, int width, int at_once) {
  unsigned vectors = columns / width, thread = blockIdx.x * THREADS + threadIdx.x;
  return {(int)(thread % vectors) * width, thread / vectors, thread / vectors >= (unsigned)at_once};
}
