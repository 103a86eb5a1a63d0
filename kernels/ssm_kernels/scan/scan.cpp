// Selective scan on channel-last rows: W channels per vector, a tile of states in registers.
//
// A task is one sample and a part of its channel blocks. It walks the length in chunks of T positions; in a chunk it
// walks its blocks, and in a block the tiles of N states. Backward recomputes the states of one chunk from the state
// at its start, which forward stored, so they stay in the cache at any length.
#include "../vector.h"

namespace ssm {
namespace {

constexpr int64_t T = 32;  // positions per chunk
#if defined(CPU_CAPABILITY_AVX512) || defined(__aarch64__)
constexpr int64_t N = 8;  // states per tile: backward keeps two vectors of each in the 32 registers,
#else
constexpr int64_t N = 4;  // or 16
#endif

// Mirrored by `Scan` in cpu.py.
struct Scan {
  int64_t b, d, l, n, parts, threads, softplus, reverse;
  Rows u, delta, B, C, z, out;  // out: y, or the gradient of y in backward
  const float *At, *D, *bias;   // At (n, d); D and bias may be null
  float* states;                // the state before every chunk but the first; null: not wanted
  Rows du, ddelta, dz;          // backward only, like the rest
  float *dB, *dC;               // (parts, b, l, n)
  float *dA, *dD, *dbias;       // (b, n, d), (b, d), (b, d)

  int64_t blocks() const { return (d + W - 1) / W; }
  int64_t padded() const { return (n + N - 1) / N * N; }
  int64_t chunks() const { return (l + T - 1) / T; }
  int64_t lanes(int64_t block) const { return std::min(W, d - block * W); }
  int64_t position(int64_t step) const { return reverse ? l - 1 - step : step; }
  float* state(int64_t sample, int64_t block, int64_t chunk) const {
    return states + ((sample * blocks() + block) * (chunks() - 1) + chunk - 1) * padded() * W;
  }
};

inline void clear(float* p, int64_t floats) { std::fill_n(p, floats, 0.f); }

// What both directions do per chunk; one object per thread.
struct Task {
  const Scan& s;
  int64_t sample = 0, start = 0, steps = 0;  // the chunk
  int64_t block = 0, channel = 0, lanes = 0;  // the block
  const int64_t stride;                       // states per position in scratch
  Buffer B, C, u, delta, y;

  explicit Task(const Scan& scan)
      : s(scan), stride(scan.padded()), B(T * stride + W), C(T * stride + W), u(T * W), delta(T * W), y(T * W) {}

  void enter_chunk(int64_t chunk) {
    start = chunk * T;
    steps = std::min(T, s.l - start);
    copy_states(s.B, B);
    copy_states(s.C, C);
  }

  // (l, n) rows of the chunk to fp32 (steps, padded n) with zero padding.
  void copy_states(const Rows& from, float* to) const {
    for (int64_t t = 0; t < steps; ++t)
      for (int64_t k = 0; k < stride; k += W) {
        const Vec x = k < s.n ? from.load(sample, s.position(start + t), k, std::min(W, s.n - k)) : Vec(0.f);
        x.store(to + t * stride + k);  // may run into the next row, which is written later
      }
  }

  void enter_block(int64_t i) {
    block = i;
    channel = i * W;
    lanes = s.lanes(i);
  }

  Vec row(const Rows& from, int64_t t) const { return from.load(sample, s.position(start + t), channel, lanes); }
  void row(const Rows& to, int64_t t, Vec x) const { to.store(sample, s.position(start + t), channel, lanes, x); }
  Vec channels(const float* p) const { return p ? Vec::loadu(p + channel, lanes) : Vec(0.f); }

  // A for states k .. k + N, zeros beyond n.
  void load_A(int64_t k, Vec* a) const {
#pragma GCC unroll 8
    for (int64_t i = 0; i < N; ++i) a[i] = k + i < s.n ? channels(s.At + (k + i) * s.d) : Vec(0.f);
  }
};

struct Forward : Task {
  Buffer h, du;

  explicit Forward(const Scan& scan)
      : Task(scan), h((scan.blocks() / scan.parts + 1) * stride * W), du(T * W) {}

  void run(int64_t of_sample, Part part) {
    sample = of_sample;
    clear(h, (part.end - part.begin) * stride * W);
    for (int64_t chunk = 0; chunk < s.chunks(); ++chunk) {
      enter_chunk(chunk);
      for (int64_t i = part.begin; i < part.end; ++i) {
        enter_block(i);
        float* state = h + (i - part.begin) * stride * W;
        if (s.states && chunk) std::copy_n(state, stride * W, s.state(sample, i, chunk));
        load_inputs();
        for (int64_t k = 0; k < stride; k += N) scan(k, state + k * W);
        for (int64_t t = 0; t < steps; ++t) {
          Vec out = get(y, t);
          if (s.z.data) {
            const Vec z = row(s.z, t);
            out = out * z * sigmoid(z);
          }
          row(s.out, t, out);
        }
      }
    }
  }

  void load_inputs() {
    const Vec bias = channels(s.bias), D = channels(s.D);
    for (int64_t t = 0; t < steps; ++t) {
      Vec step = row(s.delta, t) + bias;
      if (s.softplus) step = softplus(step);
      const Vec x = row(s.u, t);
      put(delta, t, step);
      put(du, t, step * x);
      put(y, t, D * x);
    }
  }

  void scan(int64_t k, float* state) {
    Vec a[N], x[N];
    load_A(k, a);
#pragma GCC unroll 8
    for (int64_t i = 0; i < N; ++i) x[i] = get(state, i);
    for (int64_t t = 0; t < steps; ++t) {
      const Vec step = get(delta, t), input = get(du, t);
      const float *b = B + t * stride + k, *c = C + t * stride + k;
      Vec sum = get(y, t);
#pragma GCC unroll 8
      for (int64_t i = 0; i < N; ++i) {
        x[i] = fmadd(x[i], exp(step * a[i]), input * Vec(b[i]));
        sum = fmadd(x[i], Vec(c[i]), sum);
      }
      put(y, t, sum);
    }
#pragma GCC unroll 8
    for (int64_t i = 0; i < N; ++i) put(state, i, x[i]);
  }
};

struct Backward : Task {
  Buffer slope, sigmoid_z, dy;      // softplus'(raw delta); gradient of y before the gate
  Buffer through_input, through_gate;  // gradients of delta * u, and of delta through exp(delta A)
  Buffer h, gate;                   // states (T + 1, N) and exp(delta A) (T, N) of the tile
  Buffer dB, dC;                    // (T, padded n) vectors, summed over the blocks, lanes still apart
  Buffer dh, dA, dD, dbias;         // of all blocks of the part

  explicit Backward(const Scan& scan)
      : Task(scan), slope(T * W), sigmoid_z(T * W), dy(T * W), through_input(T * W), through_gate(T * W), h((T + 1) * N * W),
        gate(T * N * W), dB(T * stride * W), dC(T * stride * W), dh(per_part()), dA(per_part()), dD(per_part()),
        dbias(per_part()) {}

  int64_t per_part() const { return (s.blocks() / s.parts + 1) * stride * W; }

  void run(int64_t of_sample, int64_t number, Part part) {
    sample = of_sample;
    const int64_t count = part.end - part.begin;
    clear(dh, count * stride * W);
    clear(dA, count * stride * W);
    clear(dD, count * W);
    clear(dbias, count * W);
    for (int64_t chunk = s.chunks(); chunk-- > 0;) {
      enter_chunk(chunk);
      clear(dB, T * stride * W);
      clear(dC, T * stride * W);
      for (int64_t i = part.begin; i < part.end; ++i) {
        enter_block(i);
        const int64_t local = i - part.begin;
        load_inputs();
        const float* state = chunk ? s.state(sample, i, chunk) : nullptr;
        for (int64_t k = 0; k < stride; k += N) {
          const int64_t offset = local * stride + k;
          Vec a[N];
          load_A(k, a);
#pragma GCC unroll 8
          for (int64_t j = 0; j < N; ++j) put(h, j, state ? get(state, k + j) : Vec(0.f));
          s.z.data ? recompute<true>(k, a) : recompute<false>(k, a);
          walk_back(k, a, dh + offset * W, dA + offset * W);
        }
        store_rows(dD + local * W, dbias + local * W);
      }
      store_states(s.dB + number * s.b * s.l * s.n, dB);
      store_states(s.dC + number * s.b * s.l * s.n, dC);
    }
    for (int64_t i = part.begin; i < part.end; ++i) {
      enter_block(i);
      const int64_t local = i - part.begin, at_d = sample * s.d + channel;
      for (int64_t k = 0; k < s.n; ++k)
        get(dA, local * stride + k).store(s.dA + (sample * s.n + k) * s.d + channel, lanes);
      if (s.dD) get(dD, local).store(s.dD + at_d, lanes);
      if (s.dbias) get(dbias, local).store(s.dbias + at_d, lanes);
    }
  }

  void load_inputs() {
    const Vec bias = channels(s.bias), D = channels(s.D);
    for (int64_t t = 0; t < steps; ++t) {
      const Vec raw = row(s.delta, t) + bias, x = row(s.u, t);
      Vec slope_here(1.f);
      put(delta, t, s.softplus ? softplus(raw, &slope_here) : raw);
      put(slope, t, slope_here);
      put(u, t, x);
      put(y, t, D * x);
      Vec g = row(s.out, t);
      if (s.z.data) {
        const Vec z = row(s.z, t), q = sigmoid(z);
        put(sigmoid_z, t, q);
        g = g * z * q;
      }
      put(dy, t, g);
      put(through_input, t, Vec(0.f));
      put(through_gate, t, Vec(0.f));
    }
  }

  template <bool with_y>
  void recompute(int64_t k, const Vec* a) {
    Vec x[N];
#pragma GCC unroll 8
    for (int64_t i = 0; i < N; ++i) x[i] = get(h, i);
    for (int64_t t = 0; t < steps; ++t) {
      const Vec step = get(delta, t), input = step * get(u, t);
      const float *b = B + t * stride + k, *c = C + t * stride + k;
      Vec sum = with_y ? get(y, t) : Vec(0.f);
#pragma GCC unroll 8
      for (int64_t i = 0; i < N; ++i) {
        const Vec g = exp(step * a[i]);
        put(gate, t * N + i, g);
        x[i] = fmadd(x[i], g, input * Vec(b[i]));
        put(h, (t + 1) * N + i, x[i]);
        if constexpr (with_y) sum = fmadd(x[i], Vec(c[i]), sum);
      }
      if constexpr (with_y) put(y, t, sum);
    }
  }

  // From the chunk's last position to its first.
  void walk_back(int64_t k, const Vec* a, float* dstate, float* dA_sum) {
    Vec g[N], da[N];
#pragma GCC unroll 8
    for (int64_t i = 0; i < N; ++i) {
      g[i] = get(dstate, i);
      da[i] = Vec(0.f);  // summed per chunk first: one running fp32 sum over l would lose digits
    }
    for (int64_t t = steps; t-- > 0;) {
      const Vec step = get(delta, t), input = step * get(u, t), dout = get(dy, t);
      const float *b = B + t * stride + k, *c = C + t * stride + k;
      float *db = dB + (t * stride + k) * W, *dc = dC + (t * stride + k) * W;
      Vec to_input(0.f), to_gate(0.f);
#pragma GCC unroll 8
      for (int64_t i = 0; i < N; ++i) {
        put(dc, i, fmadd(get(h, (t + 1) * N + i), dout, get(dc, i)));
        g[i] = fmadd(dout, Vec(c[i]), g[i]);
        put(db, i, fmadd(g[i], input, get(db, i)));
        to_input = fmadd(g[i], Vec(b[i]), to_input);
        g[i] = g[i] * get(gate, t * N + i);
        const Vec dgate = g[i] * get(h, t * N + i);
        da[i] = fmadd(dgate, step, da[i]);
        to_gate = fmadd(dgate, a[i], to_gate);
      }
      put(through_input, t, get(through_input, t) + to_input);
      put(through_gate, t, get(through_gate, t) + to_gate);
    }
#pragma GCC unroll 8
    for (int64_t i = 0; i < N; ++i) {
      put(dstate, i, g[i]);
      put(dA_sum, i, get(dA_sum, i) + da[i]);
    }
  }

  void store_rows(float* dD_sum, float* dbias_sum) {
    const Vec D = channels(s.D);
    Vec to_D(0.f), to_bias(0.f);
    for (int64_t t = 0; t < steps; ++t) {
      const Vec x = get(u, t), g = get(dy, t), to_input = get(through_input, t);
      const Vec draw = fmadd(to_input, x, get(through_gate, t)) * get(slope, t);
      row(s.du, t, fmadd(to_input, get(delta, t), g * D));
      row(s.ddelta, t, draw);
      if (s.z.data) {
        const Vec z = row(s.z, t), q = get(sigmoid_z, t);
        row(s.dz, t, row(s.out, t) * get(y, t) * q * fmadd(z, Vec(1.f) - q, Vec(1.f)));
      }
      to_D = fmadd(g, x, to_D);
      to_bias = to_bias + draw;
    }
    put(dD_sum, 0, get(dD_sum, 0) + to_D);
    put(dbias_sum, 0, get(dbias_sum, 0) + to_bias);
  }

  void store_states(float* to, const float* lanes_apart) const {
    for (int64_t t = 0; t < steps; ++t)
      for (int64_t k = 0; k < s.n; ++k)
        to[(sample * s.l + s.position(start + t)) * s.n + k] = sum_lanes(get(lanes_apart, t * stride + k));
  }
};

}  // namespace
}  // namespace ssm

extern "C" {

// What a caller needs to size things: channels per vector, positions per chunk, states per tile.
__attribute__((visibility("default"))) int lanes() { return ssm::W; }
__attribute__((visibility("default"))) int scan_chunk() { return ssm::T; }
__attribute__((visibility("default"))) int scan_tile() { return ssm::N; }

__attribute__((visibility("default"))) void scan_forward(const ssm::Scan* scan) {
  const ssm::Scan s = *scan;
#pragma omp parallel num_threads(s.threads) if (s.threads > 1)
  {
    ssm::Forward task(s);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < s.b * s.parts; ++i) task.run(i / s.parts, ssm::Part(i % s.parts, s.parts, s.blocks()));
  }
}

__attribute__((visibility("default"))) void scan_backward(const ssm::Scan* scan) {
  const ssm::Scan s = *scan;
#pragma omp parallel num_threads(s.threads) if (s.threads > 1)
  {
    ssm::Backward task(s);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < s.b * s.parts; ++i)
      task.run(i / s.parts, i % s.parts, ssm::Part(i % s.parts, s.parts, s.blocks()));
  }
}
}
