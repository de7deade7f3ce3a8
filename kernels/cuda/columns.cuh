// Rows on which a thread keeps its columns: what belongs to a column (bias, random words, sums) is loaded once.
#pragma once

struct Place {
  int column;  // the first of the thread's V
  long long row;
  bool idle;
};

// `at_once` rows are worked on by the grid at a time; a thread's next row is so many further on. Neighbours in a
// block are neighbours in a row.
__device__ inline Place place(int columns, int width, int at_once) {
  unsigned vectors = columns / width, thread = blockIdx.x * THREADS + threadIdx.x;
  return {(int)(thread % vectors) * width, thread / vectors, thread / vectors >= (unsigned)at_once};
}
