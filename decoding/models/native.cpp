// The forward of a Llama on some rows, on the CPU.
//
// Equal to the bit: the operations on a row and their order depend neither on how many rows there
// are nor on which thread does them. One product kernel serves every number of rows; threads share
// out outputs, never sums; norms and attention go row by row; a row attends to the keys that it sees
// as if they lay one after another, so that a path of a tree is a chain. Multiplications are joined
// with additions where `fma` says so and nowhere else (-ffp-contract=off).
//
// A decoding step reads every weight once, so that memory bounds it. Weights are packed
// [outputs/BLOCK][inputs/P][BLOCK][P], P = 1 of float32 and 2 of bfloat16: a block of outputs is read
// front to back while its sums stay in registers, for up to AT_ONCE rows at a time. With AMX a block of
// bfloat16 is two columns of tiles, [16 steps][16 outputs][2] each, for up to 32 rows at a time, and
// a row takes as long as 16.

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace {

// Vectors -----------------------------------------------------------------------------------------

#if defined(__AVX512F__)
#define OF(name) _mm512_##name
using V = __m512;
constexpr int LANES = 16, MOST = 12, FAR = MOST + 1;  // FAR: rows from which on L2 gets weights
template <class W>
constexpr int AT_ONCE = MOST;
constexpr bool SPREAD = false;
inline V merged_low(V a, V b) {  // a0 b0 a1 b1 ... of the lower halves
  const __m512i order = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  return _mm512_permutex2var_ps(a, order, b);
}
inline V merged_high(V a, V b) {
  const __m512i order =
      _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  return _mm512_permutex2var_ps(a, order, b);
}
#else
#define OF(name) _mm256_##name
using V = __m256;
constexpr int LANES = 8, MOST = 6, FAR = 3;  // faster so on a Zen 4; one and two rows are not
template <class W>
constexpr int AT_ONCE = sizeof(W) == 4 ? MOST : 5;  // as many as there are registers for
constexpr bool SPREAD = true;  // each tile of rows fetches a part of the next weights
inline V merged_low(V a, V b) {
  return _mm256_permute2f128_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b), 0x20);
}
inline V merged_high(V a, V b) {
  return _mm256_permute2f128_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b), 0x31);
}
#endif
inline V load(const float* p) { return OF(loadu_ps)(p); }
inline void store(float* p, V v) { OF(storeu_ps)(p, v); }
inline V kept(V v) {  // in a register, instead of read again for each use
  asm("" : "+v"(v));
  return v;
}
inline V all(float x) { return OF(set1_ps)(x); }
inline V fma(V a, V b, V c) { return OF(fmadd_ps)(a, b, c); }
inline V larger(V a, V b) { return OF(max_ps)(a, b); }  // b where one is no number
inline V smaller(V a, V b) { return OF(min_ps)(a, b); }
typedef uint32_t U __attribute__((vector_size(4 * LANES)));
constexpr int BLOCK = 2 * LANES;  // outputs
constexpr int LINE = 64;          // bytes of a cache line; a load across two takes twice as long
constexpr int AHEAD = 8192;       // bytes of weights that are fetched before their turn
constexpr int CACHED = 256;       // rows that are multiplied by all weights before others are

// n < LANES numbers, and zeros.
inline V few(const float* p, int64_t n) {
  if (n >= LANES) return load(p);
  float part[LANES] = {};
  if (n > 0) memcpy(part, p, n * sizeof(float));
  return load(part);
}

inline float total(V v) {
  float x[LANES], sum = 0;
  store(x, v);
  for (float each : x) sum += each;
  return sum;
}

// e^x (Cephes): 2^n times a polynomial of what is left; n is added to the exponent.
inline V exponential(V x) {
  x = smaller(all(88.0f), larger(all(-86.0f), x));
  const V shift = all(12582912.0f);  // rounds, and leaves n in the lowest bits
  const V t = fma(x, all(1.44269504f), shift), n = t - shift;
  const V r = fma(n, all(2.12194440e-4f), fma(n, all(-0.693359375f), x));
  V p = all(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                  5.0000001201e-1f})
    p = fma(p, r, all(c));
  const V y = fma(p, r * r, r) + all(1.0f);
  return (V)(((U)t << 23) + (U)y) + (x - x);  // no number stays none
}

// Numbers -----------------------------------------------------------------------------------------

struct Half {  // bfloat16
  uint16_t bits;
};

template <class W>
constexpr int P = 4 / sizeof(W);  // inputs that lie together
#if defined(__AMX_BF16__)
template <class W>
constexpr bool TILED = std::is_same_v<W, Half>;
#else
template <class W>
constexpr bool TILED = false;
#endif
constexpr int SIDE = 16, SIDES = 2 * SIDE;  // rows of a tile, and of those that are multiplied at once
template <class W>
constexpr int DEPTH = P<W> * (TILED<W> ? SIDE : 1);  // numbers of inputs are multiples of it
#if defined(__AVX512BF16__)
template <class W>
using X = W;  // what inputs are multiplied as
#else
template <class W>
using X = float;
#endif

inline float wide(float x) { return x; }
inline float wide(Half x) {
  const uint32_t bits = (uint32_t)x.bits << 16;
  float y;
  memcpy(&y, &bits, 4);
  return y;
}
inline void put(float x, float& y) { y = x; }
inline void put(float x, Half& y) {  // to the nearest, ties to even
  uint32_t bits;
  memcpy(&bits, &x, 4);
  y.bits = x == x ? (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 : 0x7fc0;
}

// Memory of a thread, kept between calls; what is in it is anything.
template <class T, int purpose>
T* room(int64_t size) {
  thread_local std::vector<T> held;
  const int64_t more = LINE / sizeof(T);
  if ((int64_t)held.size() < size + more) held.resize(size + more);
  return (T*)(((uintptr_t)held.data() + LINE - 1) / LINE * LINE);
}

// Threads -----------------------------------------------------------------------------------------

// Threads that help one forward at a time; another meanwhile does its work alone, with the same
// result. Between forwards they sleep. `ticket` is the number of a task set, and of its next task.
class Pool {
 public:
  Pool() : owner(getpid()) {}
  const pid_t owner;  // a fork has no threads

  bool begin(int threads) {
    if (threads < 2 || !user.try_lock()) return false;
    for (; helpers < threads - 1; ++helpers) std::thread(&Pool::help, this, helpers).detach();
    std::lock_guard<std::mutex> guard(lock);
    active = threads - 1;
    wake.notify_all();
    return true;
  }
  void end() {
    active = 0;
    user.unlock();
  }
  void run(int64_t count, void (*call)(void*, int64_t), void* what) {
    function = call, argument = what, tasks = (uint32_t)count, done = 0;
    ticket.store((uint64_t)++sets << 32, std::memory_order_release);
    work();
    for (int idle = 1; done.load(std::memory_order_acquire) < (uint32_t)count; ++idle) rest(idle);
    ticket = ((uint64_t)sets << 32) | CLOSED;  // before a helper can read of the next set
  }

 private:
  static constexpr uint32_t CLOSED = 0xffffffff;
  std::mutex user, lock;
  std::condition_variable wake;
  std::atomic<int> active{0};  // helpers of this forward
  std::atomic<uint64_t> ticket{CLOSED};
  std::atomic<uint32_t> tasks{0}, done{0};
  std::atomic<void (*)(void*, int64_t)> function{nullptr};
  std::atomic<void*> argument{nullptr};
  uint32_t sets = 0;
  int helpers = 0;

  static void rest(int idle) {
    if (idle % 64) _mm_pause();
    else std::this_thread::yield();
  }
  void work() {
    uint64_t now = ticket.load(std::memory_order_acquire);
    while ((uint32_t)now < tasks) {
      auto* call = function.load();
      void* what = argument.load();
      if (!ticket.compare_exchange_weak(now, now + 1)) continue;
      call(what, (uint32_t)now);
      done.fetch_add(1, std::memory_order_release);
      now = ticket.load(std::memory_order_acquire);
    }
  }
  void help(int number) {
    for (int idle = 1;; ++idle) {
      if (number >= active) {
        std::unique_lock<std::mutex> guard(lock);
        wake.wait(guard, [&] { return number < active; });
      }
      work();
      rest(idle);
    }
  }
};

Pool& pool() {
  static std::mutex lock;
  static Pool* one = nullptr;
  std::lock_guard<std::mutex> guard(lock);
  if (!one || one->owner != getpid()) one = new Pool();  // never freed: threads wait in it
  return *one;
}

// The threads of one call.
class Team {
 public:
  explicit Team(int threads) : shared(pool()), helped(shared.begin(threads)) {}
  ~Team() {
    if (helped) shared.end();
  }
  template <class F>
  void run(int64_t count, F&& task) {
    if (!helped || count < 2) {
      for (int64_t i = 0; i < count; ++i) task(i);
    } else {
      shared.run(count, [](void* what, int64_t i) { (*(std::remove_reference_t<F>*)what)(i); },
                 &task);
    }
  }

 private:
  Pool& shared;
  const bool helped;
};

// Products ----------------------------------------------------------------------------------------

// How n rows are split into equal parts of at most `most`.
struct Tiles {
  Tiles(int64_t n, int64_t most) : count((n + most - 1) / most), size(count ? n / count : 0),
                                   larger(count ? n % count : 0) {}
  int64_t count, size, larger;
  int64_t first(int64_t tile) const { return tile * size + std::min(tile, larger); }
  int64_t rows(int64_t tile) const { return size + (tile < larger); }
  int64_t of(int64_t row) const {
    const int64_t split = larger * (size + 1);
    return row < split ? row / (size + 1) : larger + (row - split) / size;
  }
};

template <class W>
int64_t steps_of(int64_t inputs) {
  return (inputs + DEPTH<W> - 1) / DEPTH<W> * DEPTH<W> / P<W>;
}

// Room for what `lay` puts down of n rows; tiles read up to SIDES, of any content.
template <class W>
X<W>* room_for(int64_t n, int64_t inputs) {
  if (TILED<W>) n = (n + SIDES - 1) / SIDES * SIDES;
  return room<X<W>, 6>(n * steps_of<W>(inputs) * P<W>);
}

// Put a row of inputs where products read them: [tile][steps][rows of the tile][P], and row by row
// for AMX.
template <class W>
void lay(const float* x, int64_t inputs, const Tiles& tiles, int64_t row, X<W>* out) {
  struct Step {
    X<W> of[P<W>];
  };
  const int64_t steps = steps_of<W>(inputs), tile = tiles.of(row), rows = tiles.rows(tile);
  X<W>* line = room<X<W>, 0>(steps * P<W>);
  for (int64_t i = 0; i < inputs; ++i) put(x[i], line[i]);
  for (int64_t i = inputs; i < steps * P<W>; ++i) put(0.0f, line[i]);
  if (TILED<W>) {
    constexpr int64_t width = SIDE * P<W>;
    X<W>* to = out + (row / SIDE * SIDE * steps * P<W>) + row % SIDE * width;
    for (int64_t k = 0; k < steps * P<W>; k += width, to += SIDE * width)
      memcpy(to, line + k, width * sizeof(X<W>));
    return;
  }
  Step* to = (Step*)out + tiles.first(tile) * steps + (row - tiles.first(tile));
  for (int64_t k = 0; k < steps; ++k) to[k * rows] = ((const Step*)line)[k];
}

// Sums of BLOCK outputs for R rows, [R][BLOCK].
template <class W, int R>
void kernel(const W* w, const X<W>* x, int64_t steps, const char* next, int64_t hop, float* out) {
  V sum[R][2];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = all(0.0f);
  for (int64_t k = 0; k < steps; ++k, w += BLOCK * P<W>, x += R * P<W>, next += hop) {
    for (int line = 0; line < BLOCK * 4; line += LINE)
      _mm_prefetch(next + line, R < FAR ? _MM_HINT_T0 : _MM_HINT_T1);
    const V a = load((const float*)w), b = load((const float*)w + LANES);
    if constexpr (std::is_same_v<W, float>) {
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const V y = all(x[r]);
        sum[r][0] = fma(a, y, sum[r][0]), sum[r][1] = fma(b, y, sum[r][1]);
      }
    } else {
#if defined(__AVX512BF16__)
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        int pair;
        memcpy(&pair, x + 2 * r, 4);
        const __m512bh y = (__m512bh)_mm512_set1_epi32(pair);
        sum[r][0] = _mm512_dpbf16_ps(sum[r][0], (__m512bh)a, y);
        sum[r][1] = _mm512_dpbf16_ps(sum[r][1], (__m512bh)b, y);
      }
#else
      const V a0 = (V)((U)a << 16), b0 = (V)((U)b << 16);
      const V a1 = (V)((U)a & 0xffff0000u), b1 = (V)((U)b & 0xffff0000u);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const V y = all(x[2 * r]), z = all(x[2 * r + 1]);
        sum[r][0] = fma(a1, z, fma(a0, y, sum[r][0]));
        sum[r][1] = fma(b1, z, fma(b0, y, sum[r][1]));
      }
#endif
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    store(out + r * BLOCK, sum[r][0]);
    store(out + r * BLOCK + LANES, sum[r][1]);
  }
}

template <class W, int... R>
void by_rows(int64_t rows, const W* w, const X<W>* x, int64_t steps, const char* next, int64_t hop,
             float* out, std::integer_sequence<int, R...>) {
  using Kernel = void (*)(const W*, const X<W>*, int64_t, const char*, int64_t, float*);
  static constexpr Kernel kernels[] = {kernel<W, R + 1>...};
  kernels[rows - 1](w, x, steps, next, hop, out);
}

#if defined(__AMX_BF16__)
// The shape of all tiles, 16 rows of 64 bytes, for the thread that it is made in; afterwards the
// shape is that of before, on which other libraries may rely.
class Shaped {
 public:
  Shaped() {
    alignas(64) static constexpr struct {
      uint8_t palette = 1, row = 0, none[14] = {};
      uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE};
    } ours;
    _tile_storeconfig(before);
    _tile_loadconfig(&ours);
  }
  ~Shaped() {
    asm volatile("" ::: "memory");
    if (before[0]) _tile_loadconfig(before);
    else _tile_release();
  }

 private:
  alignas(64) uint8_t before[64];
};

// Sums of BLOCK outputs for SIDES rows, or SIDE if not `both`, [..][BLOCK]. Meanwhile `lines` cache
// lines from `next` on are fetched with each column of tiles, into the first cache if `soon`.
template <bool both, bool soon>
void tiled(const Half* w, const Half* x, int64_t steps, const char* next, int64_t lines,
           float* out) {
  asm volatile("" ::: "memory");  // what is loaded has been written
  const Half* low = x + SIDE * steps * 2;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < steps; k += SIDE, w += SIDE * BLOCK * 2) {
    for (int64_t line = 0; line < lines; ++line, next += LINE)
      _mm_prefetch(next, soon ? _MM_HINT_T0 : _MM_HINT_T1);
    _tile_loadd(4, x + SIDE * 2 * k, 64);
    _tile_loadd(6, w, BLOCK * 4);
    _tile_loadd(7, w + 2 * SIDE, BLOCK * 4);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (!both) continue;
    _tile_loadd(5, low + SIDE * 2 * k, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, out, BLOCK * 4);
  _tile_stored(1, out + SIDE, BLOCK * 4);
  if (!both) return;
  _tile_stored(2, out + SIDE * BLOCK, BLOCK * 4);
  _tile_stored(3, out + SIDE * BLOCK + SIDE, BLOCK * 4);
}
#endif

// y [n, outputs] = x w + bias, added to y where it `adds`; x as `lay` leaves it.
template <class W>
void multiply(Team& team, const W* w, const X<W>* x, int64_t n, int64_t inputs,
              int64_t outputs, const float* bias, float* y, bool adds) {
  const int64_t steps = steps_of<W>(inputs), size = steps * BLOCK * 4;  // bytes of a block
  const auto keep = [&](int64_t block, int64_t first, int64_t rows, float* from) {
    const int64_t begin = block * BLOCK, width = std::min<int64_t>(BLOCK, outputs - begin);
    for (int64_t r = 0; r < rows; ++r, from += BLOCK) {
      float* to = y + (first + r) * outputs + begin;
      if (bias)
        for (int64_t i = 0; i < width; ++i) from[i] += bias[begin + i];
      if (adds)
        for (int64_t i = 0; i < width; ++i) to[i] += from[i];
      else
        memcpy(to, from, width * sizeof(float));
    }
  };
  const int64_t blocks = (outputs + BLOCK - 1) / BLOCK;
#if defined(__AMX_BF16__)
  if constexpr (TILED<W>) {
    for (int64_t start = 0; start < n; start += CACHED)  // rows that stay in a cache
      team.run(blocks, [&, start](int64_t block) {
        const Shaped shaped;
        alignas(LINE) float sums[SIDES * BLOCK];
        const int64_t stop = std::min(n, start + CACHED);
        const int64_t times = (stop - start + SIDES - 1) / SIDES;  // each fetches a part
        const int64_t lines = (SIDE * BLOCK * 4 / LINE + times - 1) / times;
        const W* held = w + block * steps * BLOCK * 2;
        const char* next = (const char*)held + (times > 1 ? size : AHEAD);
        for (int64_t first = start; first < stop; first += SIDES) {
          const int64_t rows = std::min<int64_t>(SIDES, stop - first);
          const Half* read = x + first * steps * 2;
          const auto many = rows > SIDE ? tiled<true, false> : tiled<false, false>;
          const auto few = rows > SIDE ? tiled<true, true> : tiled<false, true>;
          (times > 1 ? many : few)(held, read, steps, next, lines, sums);
          next += steps / SIDE * lines * LINE;
          keep(block, first, rows, sums);
        }
      });
    return;
  }
#endif
  const Tiles tiles(n, AT_ONCE<W>);
  team.run(blocks, [&](int64_t block) {
    alignas(LINE) float sums[MOST * BLOCK];
    for (int64_t tile = 0; tile < tiles.count; ++tile) {
      const int64_t first = tiles.first(tile), rows = tiles.rows(tile);
      const W* held = w + block * steps * BLOCK * P<W>;
      const int64_t parts = SPREAD ? tiles.count : 1, hop = BLOCK * 4 / parts;
      const int64_t ahead = parts > 1 ? size + tile * steps * hop : tile ? size : AHEAD;
      by_rows<W>(rows, held, x + first * steps * P<W>, steps, (const char*)held + ahead, hop, sums,
                 std::make_integer_sequence<int, AT_ONCE<W>>());
      keep(block, first, rows, sums);
    }
  });
}

// Rows --------------------------------------------------------------------------------------------

// RMSNorm: x / sqrt(mean(x^2) + eps) * weight.
void normed(const float* x, const float* weight, float eps, int64_t size, float* out) {
  V sum = all(0.0f);
  for (int64_t i = 0; i < size; i += LANES) {
    const V v = few(x + i, size - i);
    sum = fma(v, v, sum);
  }
  const float factor = 1.0f / std::sqrt(total(sum) / (float)size + eps);
  for (int64_t i = 0; i < size; ++i) out[i] = x[i] * factor * weight[i];
}

// silu(gate) * up of a row [gate, up].
void gated(const float* x, int64_t size, float* out) {
  for (int64_t i = 0; i < size; i += LANES) {
    const V gate = larger(all(-86.0f), few(x + i, size - i));  // below it is 0
    const V up = few(x + size + i, size - i);
    const V y = gate / (all(1.0f) + exponential(all(0.0f) - gate)) * up;
    if (size - i >= LANES) {
      store(out + i, y);
    } else {
      float part[LANES];
      store(part, y);
      memcpy(out + i, part, (size - i) * sizeof(float));
    }
  }
}

// Rotary position embedding of the first `size` numbers; the first half of sin is negated.
void rotate(float* x, const float* cos, const float* sin, int64_t size) {
  const int64_t half = size / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float a = x[i], b = x[i + half];
    x[i] = a * cos[i] + b * sin[i];
    x[i + half] = b * cos[i + half] + a * sin[i + half];
  }
}

}  // namespace

// What the caller passes --------------------------------------------------------------------------

struct Layer {
  const void *qkv, *out, *gate_up, *down;  // packed
  const float *qkv_bias, *out_bias, *gate_up_bias, *down_bias;  // or null
  const float *norm, *mlp_norm, *q_norm, *k_norm;               // the last two: or null
  float eps, mlp_eps, q_eps, k_eps;
};

struct Shape {
  int32_t bytes;  // of a weight: 4 of float32, 2 of bfloat16
  int32_t hidden, heads, kv_heads, dim, inner, rotated;
  const float *cos, *sin;  // [positions, rotated]
};

struct Held {  // of a layer of a sequence, [kv_heads, capacity, dim]
  void *keys, *values;
  int64_t capacity;
};

struct Part {  // the rows of one sequence
  int64_t first, n, start;  // rows before these in the call, these, and those that are cached
  const uint8_t* seen;      // [n, start + n]; null: all up to the row
};

struct Rows {
  int32_t parts, total, threads;
  const Part* part;          // [parts], one after another
  const int64_t* positions;  // [total]
  float* states;             // [total, hidden], read and written
};

namespace {

// Attention ---------------------------------------------------------------------------------------

constexpr int64_t TOGETHER = 16;  // rows that share keys which are laid out once

// LANES rows of words of 32 bits -> their columns, by perfect shuffles.
inline void transpose(V* a) {
  V b[LANES];
  for (int stage = 1; stage < LANES; stage *= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < LANES / 2; ++i) {
      b[2 * i] = merged_low(a[i], a[i + LANES / 2]);
      b[2 * i + 1] = merged_high(a[i], a[i + LANES / 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i) a[i] = b[i];
  }
}

// Rows `at` [count <= LANES] of keys [.., dim] as [dim][LANES].
template <class W>
void turned(const W* keys, const int32_t* at, int64_t count, int64_t dim, float* out) {
  const int64_t words = dim / P<W>;
  for (int64_t first = 0; first < words; first += LANES) {
    V a[LANES];
    for (int64_t i = 0; i < LANES; ++i)
      a[i] = i < count ? few((const float*)(keys + at[i] * dim) + first, words - first) : all(0.0f);
    transpose(a);
    for (int64_t j = 0; j < std::min<int64_t>(LANES, words - first); ++j) {
      float* to = out + (first + j) * P<W> * LANES;
      if constexpr (std::is_same_v<W, float>) {
        store(to, a[j]);
      } else {
        store(to, (V)((U)a[j] << 16));
        store(to + LANES, (V)((U)a[j] & 0xffff0000u));
      }
    }
  }
}

// Scores of LANES keys, laid out, for N heads; queries: [N, dim], scores: N, `apart`.
template <int N>
void scored(const float* queries, int64_t dim, const float* keys, float* scores, int64_t apart) {
  V even[N], odd[N];  // dim is even
  for (int h = 0; h < N; ++h) even[h] = odd[h] = all(0.0f);
  for (int64_t i = 0; i < dim; i += 2) {
    const V a = kept(load(keys + i * LANES)), b = kept(load(keys + (i + 1) * LANES));
    for (int h = 0; h < N; ++h) {
      even[h] = fma(all(queries[h * dim + i]), a, even[h]);
      odd[h] = fma(all(queries[h * dim + i + 1]), b, odd[h]);
    }
  }
  const V scale = all(1.0f / std::sqrt((float)dim));
  for (int h = 0; h < N; ++h) store(scores + h * apart, (even[h] + odd[h]) * scale);
}

// Add to out [N, size] the sums of `count` values [.., size], by the weights of N heads.
template <int N>
void weighted(const float* weights, int64_t apart, int64_t count, const float* values,
              int64_t size, float* out) {
  const auto columns = [&](int64_t first, auto number) {
    constexpr int M = decltype(number)::value;
    V sum[N][M];
    for (int h = 0; h < N; ++h)
      for (int j = 0; j < M; ++j) sum[h][j] = load(out + h * size + first + j * LANES);
    for (int64_t i = 0; i < count; ++i)
      for (int j = 0; j < M; ++j) {
        const V value = kept(load(values + i * size + first + j * LANES));
        for (int h = 0; h < N; ++h)
          sum[h][j] = fma(all(weights[h * apart + i]), value, sum[h][j]);
      }
    for (int h = 0; h < N; ++h)
      for (int j = 0; j < M; ++j) store(out + h * size + first + j * LANES, sum[h][j]);
  };
  int64_t first = 0;
  for (; first + 4 * LANES <= size; first += 4 * LANES)
    columns(first, std::integral_constant<int, 4>());
  for (; first < size; first += LANES) columns(first, std::integral_constant<int, 1>());
}

// use(first head, integral constant N) for all heads, up to four at a time.
template <class F>
void by_heads(int64_t heads, F&& use) {
  int64_t first = 0;
  for (; first + 4 <= heads; first += 4) use(first, std::integral_constant<int, 4>());
  switch (heads - first) {
    case 3: return use(first, std::integral_constant<int, 3>());
    case 2: return use(first, std::integral_constant<int, 2>());
    case 1: return use(first, std::integral_constant<int, 1>());
  }
}

// Softmax of `count` scores; those behind, up to LANES, are -inf.
inline void softmax(float* scores, int64_t count) {
  V most = all(-INFINITY), sum = all(0.0f);
  for (int64_t i = 0; i < count; i += LANES) most = larger(most, load(scores + i));
  float lanes[LANES];
  store(lanes, most);
  const V top = all(*std::max_element(lanes, lanes + LANES));
  for (int64_t i = 0; i < count; i += LANES) {
    const V weight = exponential(load(scores + i) - top);
    store(scores + i, weight);
    sum = sum + weight;  // what is behind the last key adds less than a rounding
  }
  const V factor = all(1.0f / total(sum));
  for (int64_t i = 0; i < count; i += LANES) store(scores + i, load(scores + i) * factor);
}

// The rows that each row sees, in the order of its sequence's cache.
struct Seen {
  std::vector<std::vector<int32_t>> lists;
  std::vector<const int32_t*> rows;
  std::vector<int64_t> counts;

  explicit Seen(const Rows& r) {
    int64_t longest = 0;
    for (int64_t b = 0; b < r.parts; ++b) longest = std::max(longest, r.part[b].start + r.part[b].n);
    std::vector<int32_t> all(longest);
    for (int64_t j = 0; j < longest; ++j) all[j] = (int32_t)j;
    lists.push_back(std::move(all));
    const uint8_t* last = nullptr;
    for (int64_t b = 0; b < r.parts; ++b) {
      const Part& part = r.part[b];
      const int64_t length = part.start + part.n;
      if (part.seen && part.seen != last) {  // one mask may be that of several
        last = part.seen;
        lists.emplace_back(part.n * length);
      }
      for (int64_t i = 0; i < part.n; ++i) {
        int32_t* begin = part.seen ? lists.back().data() + i * length : lists[0].data();
        int64_t count = part.seen ? 0 : part.start + i + 1;
        if (part.seen)
          for (int64_t j = 0; j < length; ++j)
            if (part.seen[i * length + j]) begin[count++] = (int32_t)j;
        rows.push_back(begin);
        counts.push_back(count);
      }
    }
  }
};

// Attention of rows [first, last) of a sequence with all query heads of one key head.
// queries: [n, stride], keys and values: [.., dim]; out: [n, heads * dim].
template <class W>
void attend(const Shape& s, const Seen& seen, int64_t list, int64_t first, int64_t last,
            int64_t head, const float* queries, int64_t stride, const W* keys, const W* values,
            float* out) {
  const int64_t dim = s.dim, groups = s.heads / s.kv_heads, wanted = last - first;
  const int64_t padded = (dim + LANES - 1) / LANES * LANES;
  int64_t blocks = 0;
  for (int64_t r = first; r < last; ++r)
    blocks = std::max(blocks, (seen.counts[list + r] + LANES - 1) / LANES);
  const int64_t apart = blocks * LANES;
  float* scores = room<float, 1>(wanted * groups * apart);
  float* laid = room<float, 2>(LANES * std::max(dim, padded));
  float* sums = room<float, 3>(wanted * groups * padded);
  std::fill(sums, sums + wanted * groups * padded, 0.0f);
  std::fill(laid, laid + LANES * std::max(dim, padded), 0.0f);
  // What is laid out serves all rows that begin with the same keys: the last of a chain sees most.
  const auto each = [&](auto&& lay_out, auto&& use) {
    for (int64_t block = 0; block < blocks; ++block) {
      const int32_t* held = nullptr;
      int64_t held_count = 0;
      for (int64_t r = last; r-- > first;) {
        const int32_t* at = seen.rows[list + r] + block * LANES;
        const int64_t count = std::min<int64_t>(LANES, seen.counts[list + r] - block * LANES);
        if (count <= 0) continue;
        if (count > held_count || memcmp(at, held, count * sizeof(int32_t)))
          lay_out(at, count), held = at, held_count = count;
        by_heads(groups, [&](int64_t g, auto number) {
          const int64_t from = (r - first) * groups + g;
          use(r, g, number, count, scores + from * apart + block * LANES, sums + from * padded);
        });
      }
    }
  };
  each([&](const int32_t* at, int64_t count) { turned(keys, at, count, dim, laid); },
       [&](int64_t r, int64_t g, auto number, int64_t count, float* score, float*) {
         constexpr int N = decltype(number)::value;
         scored<N>(queries + r * stride + (head * groups + g) * dim, dim, laid, score, apart);
         for (int h = 0; h < N; ++h)
           std::fill(score + h * apart + count, score + h * apart + LANES, -INFINITY);
       });
  for (int64_t query = 0; query < wanted * groups; ++query)
    softmax(scores + query * apart, seen.counts[list + first + query / groups]);
  each(
      [&](const int32_t* at, int64_t count) {
        for (int64_t i = 0; i < count; ++i)
          for (int64_t j = 0; j < dim; ++j) laid[i * padded + j] = wide(values[at[i] * dim + j]);
      },
      [&](int64_t, int64_t, auto number, int64_t count, float* weights, float* to) {
        weighted<decltype(number)::value>(weights, apart, count, laid, padded, to);
      });
  for (int64_t query = 0; query < wanted * groups; ++query)
    memcpy(out + ((first + query / groups) * s.heads + head * groups + query % groups) * dim,
           sums + query * padded, dim * sizeof(float));
}

// Layers ------------------------------------------------------------------------------------------

template <class W>
void run_layers(const Shape& s, const Layer* layers, const Held* held, const Rows& rows,
                int64_t count) {
  Team team(rows.threads);
  const Seen seen(rows);
  const int64_t total_rows = rows.total, width = s.heads * s.dim;
  const Tiles tiles(total_rows, AT_ONCE<W>);
  std::vector<int64_t> part_of;
  std::vector<std::pair<int64_t, int64_t>> shares;  // a part, and the first of up to TOGETHER rows
  for (int64_t b = 0; b < rows.parts; ++b)
    for (int64_t i = 0; i < rows.part[b].n; ++i) {
      part_of.push_back(b);
      if (i % TOGETHER == 0) shares.emplace_back(b, i);
    }
  const int64_t wide_qkv = (s.heads + 2 * s.kv_heads) * s.dim;
  const int64_t widest = std::max<int64_t>({s.hidden, width, s.inner});
  float* y = room<float, 4>(total_rows * std::max<int64_t>(wide_qkv, 2 * s.inner));
  float* mixed = room<float, 5>(total_rows * width);
  X<W>* x = room_for<W>(total_rows, widest);
  const auto norm_and_lay = [&](const float* weight, float eps) {
    team.run(total_rows, [&](int64_t row) {
      float* line = room<float, 7>(s.hidden);
      normed(rows.states + row * s.hidden, weight, eps, s.hidden, line);
      lay<W>(line, s.hidden, tiles, row, x);
    });
  };
  for (int64_t index = 0; index < count; ++index) {
    const Layer& layer = layers[index];
    const Held* caches = held + index * rows.parts;
    norm_and_lay(layer.norm, layer.eps);
    multiply<W>(team, (const W*)layer.qkv, x, total_rows, s.hidden, wide_qkv, layer.qkv_bias, y,
                false);
    team.run(total_rows, [&](int64_t row) {
      const Part& part = rows.part[part_of[row]];
      const Held& cache = caches[part_of[row]];
      W *keys = (W*)cache.keys, *values = (W*)cache.values;
      const int64_t position = rows.positions[row] * s.rotated;
      float* states = y + row * wide_qkv;
      for (int64_t h = 0; h < s.heads + s.kv_heads; ++h) {
        const bool query = h < s.heads;
        if (const float* weight = query ? layer.q_norm : layer.k_norm)
          normed(states + h * s.dim, weight, query ? layer.q_eps : layer.k_eps, s.dim,
                 states + h * s.dim);
        rotate(states + h * s.dim, s.cos + position, s.sin + position, s.rotated);
      }
      for (int64_t h = 0; h < s.kv_heads; ++h) {
        const int64_t to = (h * cache.capacity + part.start + row - part.first) * s.dim;
        const float* key = states + (s.heads + h) * s.dim;
        const float* value = key + s.kv_heads * s.dim;
        for (int64_t j = 0; j < s.dim; ++j) put(key[j], keys[to + j]);
        for (int64_t j = 0; j < s.dim; ++j) put(value[j], values[to + j]);
      }
    });
    team.run(shares.size() * s.kv_heads, [&](int64_t task) {
      const auto [b, first] = shares[task / s.kv_heads];
      const int64_t h = task % s.kv_heads, from = h * caches[b].capacity * s.dim;
      const Part& part = rows.part[b];
      attend<W>(s, seen, part.first, first, std::min(part.n, first + TOGETHER), h,
                y + part.first * wide_qkv, wide_qkv, (const W*)caches[b].keys + from,
                (const W*)caches[b].values + from, mixed + part.first * width);
    });
    team.run(total_rows, [&](int64_t row) { lay<W>(mixed + row * width, width, tiles, row, x); });
    multiply<W>(team, (const W*)layer.out, x, total_rows, width, s.hidden, layer.out_bias,
                rows.states, true);
    norm_and_lay(layer.mlp_norm, layer.mlp_eps);
    multiply<W>(team, (const W*)layer.gate_up, x, total_rows, s.hidden, 2 * s.inner,
                layer.gate_up_bias, y, false);
    team.run(total_rows, [&](int64_t row) {
      float* line = room<float, 8>(s.inner);
      gated(y + row * 2 * s.inner, s.inner, line);
      lay<W>(line, s.inner, tiles, row, x);
    });
    multiply<W>(team, (const W*)layer.down, x, total_rows, s.inner, s.hidden, layer.down_bias,
                rows.states, true);
  }
}

template <class W>
void run_linear(int64_t n, int64_t inputs, int64_t outputs, int threads, const void* weight,
                const float* bias, const float* x, float* y) {
  Team team(threads);
  const Tiles tiles(n, AT_ONCE<W>);
  X<W>* laid = room_for<W>(n, inputs);
  team.run(n, [&](int64_t row) { lay<W>(x + row * inputs, inputs, tiles, row, laid); });
  multiply<W>(team, (const W*)weight, laid, n, inputs, outputs, bias, y, false);
}

}  // namespace

// What the caller calls ---------------------------------------------------------------------------

extern "C" {

int32_t block() { return BLOCK; }

// What the number of a weight's inputs is a multiple of, zeros among them.
int32_t depth(int32_t bytes) { return bytes == 2 ? DEPTH<Half> : DEPTH<float>; }

// Whether the system lets this process use what the library is made of: it has to be asked for AMX.
int32_t allowed() {
#if defined(__AMX_BF16__)
  return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* the tiles */) == 0;
#else
  return 1;
#endif
}

// Append rows to the caches and run `count` layers on them. held: [count, parts].
void run(const Shape* shape, const Layer* layers, const Held* held, const Rows* rows,
         int64_t count) {
  (shape->bytes == 2 ? run_layers<Half> : run_layers<float>)(*shape, layers, held, *rows, count);
}

// RMSNorm of rows [n, size].
void norm(int64_t n, int64_t size, const float* weight, float eps, const float* x, float* y) {
  for (int64_t row = 0; row < n; ++row) normed(x + row * size, weight, eps, size, y + row * size);
}

// y [n, outputs] = x [n, inputs] times a packed weight, plus a bias or null.
void linear(int32_t bytes, int64_t n, int64_t inputs, int64_t outputs, int32_t threads,
            const void* weight, const float* bias, const float* x, float* y) {
  (bytes == 2 ? run_linear<Half> : run_linear<float>)(n, inputs, outputs, threads, weight, bias, x,
                                                      y);
}

// Hash some words of each of `count` arrays, all of a short one; others at each of 8 phases.
uint64_t sampled(const uint8_t* const* arrays, const int64_t* bytes, int64_t count, int32_t phase) {
  uint64_t hash = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t step = (bytes[i] / 15 / 2 * 2) | 2;  // high and low halves of float32 in turn
    for (int64_t at = step * phase / 16 * 2; at + 2 <= bytes[i]; at += step) {
      uint16_t word;
      memcpy(&word, arrays[i] + at, 2);
      hash = (hash ^ word) * 0x100000001b3u;
      hash ^= hash >> 29;
    }
  }
  return hash;
}

}  // extern "C"
