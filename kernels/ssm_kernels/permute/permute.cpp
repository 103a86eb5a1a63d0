// Rows of several (b, l, ...) tensors moved by one permutation: bytes, whatever their dtype.
#include "../vector.h"

#include <cstring>

namespace ssm {
namespace {

// Mirrored by `_Rows` in cpu.py. Strides and the row's size in bytes; `to` is contiguous.
struct Copy {
  const char* from;
  char* to;
  int64_t batch, row, bytes;
};

// Mirrored by `_Call` in cpu.py.
struct Permute {
  int64_t b, l, tensors, threads, scatter;
  const int64_t* index;
  const Copy* copies;
};

// Row `index[i]` to row i, or back: row i to row `index[i]`. The side that is not permuted is walked in order.
void run(const Permute& s) {
#pragma omp parallel for schedule(static) num_threads(s.threads) if (s.threads > 1)
  for (int64_t n = 0; n < s.b * s.l; ++n) {
    const int64_t sample = n / s.l, i = n % s.l, other = s.index[i];
    const int64_t from = s.scatter ? i : other, to = s.scatter ? other : i;
    for (const Copy* c = s.copies; c != s.copies + s.tensors; ++c)
      std::memcpy(c->to + (sample * s.l + to) * c->bytes, c->from + sample * c->batch + from * c->row, c->bytes);
  }
}

}  // namespace
}  // namespace ssm

extern "C" {
__attribute__((visibility("default"))) void permute_rows(const ssm::Permute* call) { ssm::run(*call); }

// The first position whose value is not in 0..length - 1; -1: none.
__attribute__((visibility("default"))) int permute_wrong(const int64_t* index, int64_t length) {
  const auto* found = std::find_if(index, index + length, [=](int64_t i) { return i < 0 || i >= length; });
  return found == index + length ? -1 : static_cast<int>(found - index);
}
}
