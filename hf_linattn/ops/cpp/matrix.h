// Products of small matrices that lie in cache, their transposes, and exponentials, in vectors of any width.
//
// All matrices are float32, row by row, their rows padded with zeros to whole vectors.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

// ROWS x COLUMNS vectors of sums stay in registers, with COLUMNS more and one of the factors
#if defined(__AVX512F__)
constexpr int WIDTH = 16, ROWS = 6, COLUMNS = 4;
#elif defined(__AVX__)
constexpr int WIDTH = 8, ROWS = 6, COLUMNS = 2;
#else
constexpr int WIDTH = 4, ROWS = 4, COLUMNS = 2;
#endif

typedef float Floats __attribute__((vector_size(WIDTH * 4)));
typedef int32_t Ints __attribute__((vector_size(WIDTH * 4)));
typedef float Unaligned __attribute__((vector_size(WIDTH * 4), aligned(4), may_alias));

inline Floats load(const float* x) { return *reinterpret_cast<const Unaligned*>(x); }
inline void store(float* x, Floats y) { *reinterpret_cast<Unaligned*>(x) = y; }
inline Floats broadcast(float x) { return x - Floats{}; }
inline int padded(int n) { return (n + WIDTH - 1) / WIDTH * WIDTH; }

// Lanes of a and b (those of b count on from a's), in an order that the compiler knows.
template <class Order, int... lane>
inline Floats shuffle(Floats a, Floats b, std::integer_sequence<int, lane...>) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, Order::from(lane)...);
#else
    return __builtin_shuffle(a, b, Ints{Order::from(lane)...});
#endif
}

typedef std::make_integer_sequence<int, WIDTH> Lanes;

inline Ints lanes() {
    Ints index;
    for (int lane = 0; lane < WIDTH; ++lane) index[lane] = lane;
    return index;
}

template <int apart>
struct Neighbours {
    static constexpr int from(int lane) { return lane ^ apart; }
};

template <int apart = WIDTH / 2, class Combine>
inline float reduce(Floats x,
                    Combine combine) {  // every lane with its neighbour, every pair with the next one
    x = combine(x, shuffle<Neighbours<apart>>(x, x, Lanes()));
    if constexpr (apart > 1) return reduce<apart / 2>(x, combine);
    return x[0];
}

inline float sum(Floats x) {
    return reduce(x, [](Floats a, Floats b) { return a + b; });
}

inline float max_of(Floats x) {
    return reduce(x, [](Floats a, Floats b) { return a > b ? a : b; });
}

template <int half>
struct Unzipped {
    static constexpr int from(int lane) { return 2 * lane + half; }
};

// The sum of each of as many vectors as one has lanes, which are written over.
inline Floats sums(Floats (&x)[WIDTH]) {
    for (int n = WIDTH / 2; n; n /= 2)
        for (int i = 0; i < n; ++i)
            x[i] = shuffle<Unzipped<0>>(x[2 * i], x[2 * i + 1], Lanes()) +
                   shuffle<Unzipped<1>>(x[2 * i], x[2 * i + 1], Lanes());
    return x[0];
}

inline void scale(float* x, float factor, int64_t count) {  // in whole vectors, as below
    for (int64_t i = 0; i < count; i += WIDTH) store(x + i, load(x + i) * factor);
}

// Bits of a bfloat16.
struct Short {
    uint16_t bits;
};
typedef uint16_t Shorts __attribute__((vector_size(WIDTH * 2)));
typedef uint32_t Words __attribute__((vector_size(WIDTH * 4)));

inline Floats load(const Short* x) {
    Shorts bits;
    memcpy(&bits, x, sizeof bits);
    return (Floats)(__builtin_convertvector(bits, Words) << 16);
}
inline float value_of(float x) { return x; }
inline float value_of(Short x) {
    const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

template <class Number>
inline float dot(const Number* x, const float* y, int columns) {
    Floats total = {};
    for (int i = 0; i < columns; i += WIDTH) total += load(x + i) * load(y + i);
    return sum(total);
}

// y = A x + b of a dense A [rows, columns] and any b, or none.
template <class Number>
inline void apply(const Number* a, const float* b, int rows, int columns, const float* x, float* y) {
    const int whole = columns / WIDTH * WIDTH;
    int i = 0;
    for (; i + WIDTH <= rows; i += WIDTH) {
        Floats parts[WIDTH];
        for (int m = 0; m < WIDTH; ++m) {
            parts[m] = Floats{};
            for (int e = 0; e < whole; e += WIDTH) parts[m] += load(a + (i + m) * columns + e) * load(x + e);
        }
        store(y + i, sums(parts));
    }
    for (; i < rows; ++i) y[i] = dot(a + i * columns, x, whole);
    for (i = 0; i < rows; ++i) {
        for (int e = whole; e < columns; ++e) y[i] += value_of(a[i * columns + e]) * x[e];
        if (b) y[i] += b[i];
    }
}

// e^x for x <= 0, or e^x - 1, to 2 units in the last place; 0 or -1 below -88, NaN for NaN. After Cephes'
// expf.
template <bool less_one>
inline Floats exp_of_nonpositive(Floats x) {
#if !defined(__AVX512F__)
    x = x < -88.0f ? broadcast(-88.0f) : x;  // of which the power of two is 0
#endif
    const float shift = 12582912.0f;  // adding it rounds to whole numbers
    Floats n = (x * 1.44269504088896341f + shift) - shift;
    Floats r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    Floats p = broadcast(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r;
    if (!less_one) p = p + 1.0f;
#if defined(__AVX512F__)
    const Floats zero = {}, one = zero + 1.0f;
    p = x < -88.0f ? zero : (Floats)_mm512_scalef_ps((__m512)p, (__m512)n);
    if (!less_one) return p;
    return p + ((Floats)_mm512_scalef_ps((__m512)one, (__m512)n) - 1.0f);
#else
    Ints bits = (__builtin_convertvector(n, Ints) + 127) << 23;
    Floats power;
    memcpy(&power, &bits, sizeof power);
    return less_one ? p * power + (power - 1.0f) : p * power;
#endif
}

inline Floats exp_nonpositive(Floats x) { return exp_of_nonpositive<false>(x); }

inline Floats expm1_nonpositive(Floats x) { return exp_of_nonpositive<true>(x); }

// Whether any lane is above a number; a lane of NaN is not.
inline bool any_above(Floats x, float y) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)x, (__m512)broadcast(y), _CMP_GT_OQ);
#else
    return max_of(x) > y;
#endif
}

// The dot products of x with rows that lie `stride` apart.
inline void dots(const float* x, const float* rows, int64_t stride, int count, int columns, float* to) {
    int j = 0;
    for (; j + WIDTH <= count; j += WIDTH) {  // as many at once as a vector has sums
        Floats parts[WIDTH];
        for (int m = 0; m < WIDTH; ++m) {
            const float* row = rows + (j + m) * stride;
            parts[m] = load(x) * load(row);
            for (int d = WIDTH; d < columns; d += WIDTH) parts[m] += load(x + d) * load(row + d);
        }
        store(to + j, sums(parts));
    }
    for (; j < count; ++j) to[j] = dot(rows + j * stride, x, columns);
}

struct Exponentials {
    float top, sum;
};

// e^(x - top) of numbers in whole vectors, with the largest as top.
inline Exponentials exponentials(const float* x, int count, float* to) {
    Floats peak = broadcast(std::numeric_limits<float>::lowest()), total = {};
    for (int j = 0; j < count; j += WIDTH) {
        const Floats values = load(x + j);
        peak = values > peak ? values : peak;
    }
    const float top = max_of(peak);
    for (int j = 0; j < count; j += WIDTH) {
        const Floats weight = exp_nonpositive(load(x + j) - top);
        store(to + j, weight);
        total += weight;
    }
    return {top, sum(total)};
}

// A factor of a product: element (row, column) is at data[row * along_rows + column * along_columns]. An
// element is a float, or, with AVX512-BF16, a pair of bfloat16 that lie behind each other along the inner
// axis (operands.h).
template <class Element>
struct Factor {
    const Element* data;
    int64_t along_rows, along_columns;
};

typedef Factor<float> LeftFactor;

inline void add_product(Floats& sum, float x, Floats right) { sum += broadcast(x) * right; }

template <int M, int V, class Element>
inline void tile(const Factor<Element>& a, int row, int inner, const Element* b, int64_t b_row, float* c,
                 int64_t c_row, bool add) {
    Floats sums[M][V];
    for (int m = 0; m < M; ++m)
        for (int v = 0; v < V; ++v) sums[m][v] = add ? load(c + m * c_row + v * WIDTH) : Floats{};
    const Element* left = a.data + row * a.along_rows;
    for (int k = 0; k < inner; ++k) {
        decltype(load(b)) right[V];  // for all rows: GCC would else jam loops, with sums in memory
        for (int v = 0; v < V; ++v) right[v] = load(b + k * b_row + v * WIDTH);
        for (int m = 0; m < M; ++m) {
            const Element x = left[m * a.along_rows + k * a.along_columns];
            for (int v = 0; v < V; ++v) add_product(sums[m][v], x, right[v]);
        }
    }
    for (int m = 0; m < M; ++m)
        for (int v = 0; v < V; ++v) store(c + m * c_row + v * WIDTH, sums[m][v]);
}

// Not inlined: beside the variables of a caller the addresses of rows would not stay in registers.
template <int M, class Element>
__attribute__((noinline)) void strip(const Factor<Element>& a, int row, int inner, const Element* b,
                                     int64_t b_row, float* c, int64_t c_row, int columns, bool add) {
    int v = 0, vectors = columns / WIDTH;
    for (; v + COLUMNS <= vectors; v += COLUMNS)
        tile<M, COLUMNS>(a, row, inner, b + v * WIDTH, b_row, c + v * WIDTH, c_row, add);
    if constexpr (COLUMNS == 4)
        for (; v + 2 <= vectors; v += 2)
            tile<M, 2>(a, row, inner, b + v * WIDTH, b_row, c + v * WIDTH, c_row, add);
    for (; v < vectors; ++v) tile<M, 1>(a, row, inner, b + v * WIDTH, b_row, c + v * WIDTH, c_row, add);
}

// Rows `row` to `row + count` (at most ROWS) of C = A B, or C += A B; `columns` in whole vectors.
template <int M = ROWS, class Element>
inline void few_rows_of_product(const Factor<Element>& a, int row, int count, int inner, const Element* b,
                                int64_t b_row, float* c, int64_t c_row, int columns, bool add) {
    if (count == M) return strip<M>(a, row, inner, b, b_row, c + row * c_row, c_row, columns, add);
    if constexpr (M > 1) few_rows_of_product<M - 1>(a, row, count, inner, b, b_row, c, c_row, columns, add);
}

// Rows of a product that are computed together.
template <class Element>
constexpr int STRIP = ROWS;

// The same for at most STRIP<Element> rows; on tiles there is another one (tiles.h).
template <class Element>
inline void rows_of_product(const Factor<Element>& a, int row, int count, int inner, const Element* b,
                            int64_t b_row, float* c, int64_t c_row, int columns, bool add) {
    few_rows_of_product(a, row, count, inner, b, b_row, c, c_row, columns, add);
}

// C = A B, or C += A B: A [rows, inner], B [inner, columns].
template <class Element>
inline void product(const Factor<Element>& a, int rows, int inner, const Element* b, int64_t b_row, float* c,
                    int64_t c_row, int columns, bool add) {
    for (int row = 0; row < rows; row += STRIP<Element>)
        rows_of_product(a, row, std::min(STRIP<Element>, rows - row), inner, b, b_row, c, c_row, columns,
                        add);
}

template <int half>  // of each that takes part
struct Interleaved {
    static constexpr int from(int lane) { return (lane + half * WIDTH) / 2 + lane % 2 * WIDTH; }
};

// B = A^T, by perfect shuffles of square blocks: A [rows, columns], both in whole vectors, of which
// `read(row, column)` gives one.
template <class Read>
inline void transpose(Read read, int rows, int columns, float* b, int64_t b_row) {
    for (int row = 0; row < rows; row += WIDTH)
        for (int column = 0; column < columns; column += WIDTH) {
            Floats now[WIDTH], next[WIDTH];
            for (int i = 0; i < WIDTH; ++i) now[i] = read(row + i, column);
            for (int stage = 1; stage < WIDTH; stage *= 2) {
                for (int i = 0; i < WIDTH / 2; ++i) {
                    next[2 * i] = shuffle<Interleaved<0>>(now[i], now[i + WIDTH / 2], Lanes());
                    next[2 * i + 1] = shuffle<Interleaved<1>>(now[i], now[i + WIDTH / 2], Lanes());
                }
                for (int i = 0; i < WIDTH; ++i) now[i] = next[i];
            }
            for (int i = 0; i < WIDTH; ++i) store(b + (column + i) * b_row + row, now[i]);
        }
}

inline void transpose(const float* a, int64_t a_row, int rows, int columns, float* b, int64_t b_row) {
    transpose([=](int row, int column) { return load(a + row * a_row + column); }, rows, columns, b, b_row);
}
