// Rows of several (b, l, ...) tensors moved by one permutation: bytes, whatever their dtype.
#include "../vector.h"

#include <cstring>
#include <vector>

namespace ssm {
namespace {

constexpr int64_t kRows = 64, kLine = 64;  // rows per part of the work; bytes per cache line

// Strides and the row's size in bytes; `to` is contiguous.
struct Copy {
  const char* from;
  char* to;
  int64_t batch, row, bytes;
};

// cpu.py writes it as so many 64-bit numbers.
struct Permute {
  int64_t b, l, tensors, threads, inverse;
  const int64_t* index;
  Copy copies[];
};

// A loop over cache lines: for a row, faster than calling memcpy.
inline void copy(char* to, const char* from, int64_t bytes) {
  int64_t k = 0;
  for (; k + kLine <= bytes; k += kLine) std::memcpy(to + k, from + k, kLine);
  if (k < bytes) std::memcpy(to + k, from + k, bytes - k);
}

// Brings a row to the second-level cache.
inline void fetch(const char* row, int64_t bytes) {
  for (int64_t k = 0; k < bytes; k += kLine) __builtin_prefetch(row + k, 0, 2);
}

// Row `index[i]` to row i, or back by the inverse: what is written is written in order.
//
// No processor foresees permuted rows, but the next sample's can be fetched in the order of memory ahead of their use.
void run(const Permute& s) {
  std::vector<int64_t> index(s.index, s.index + s.l);
  for (int64_t i = 0; s.inverse && i < s.l; ++i) index[s.index[i]] = i;
  const int64_t rows = s.b * s.l, parts = (rows + kRows - 1) / kRows;
#pragma omp parallel for schedule(static) num_threads(s.threads) if (s.threads > 1)
  for (int64_t part = 0; part < parts; ++part)
    for (const Copy* c = s.copies; c != s.copies + s.tensors; ++c) {
      int64_t sample = part * kRows / s.l, i = part * kRows % s.l;
      for (int64_t n = part * kRows; n < std::min(rows, (part + 1) * kRows); ++n) {
        if (sample + 1 < s.b) fetch(c->from + (sample + 1) * c->batch + i * c->row, c->bytes);
        copy(c->to + n * c->bytes, c->from + sample * c->batch + index[i] * c->row, c->bytes);
        if (++i == s.l) i = 0, ++sample;
      }
    }
}

}  // namespace
}  // namespace ssm

extern "C" {
// The first position whose value is not in 0..length - 1; -1: none.
__attribute__((visibility("default"))) int permute_wrong(const int64_t* index, int64_t length) {
  const auto* found = std::find_if(index, index + length, [=](int64_t i) { return i < 0 || i >= length; });
  return found == index + length ? -1 : static_cast<int>(found - index);
}

// As above; copies where there is none.
__attribute__((visibility("default"))) int permute_rows(const ssm::Permute* call) {
  const int wrong = permute_wrong(call->index, call->l);
  if (wrong < 0) ssm::run(*call);
  return wrong;
}
}
