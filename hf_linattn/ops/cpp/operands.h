// Factors of products: floats as they lie, or pairs of bfloat16, where the processor multiplies those with
// sums in float32 (AVX512-BF16).
//
// A pair holds two steps of the inner axis. `along_rows` makes them of neighbours in a row, for a left factor
// A [rows, inner] as it lies; `across_rows` of neighbours in a column, for a right factor B [inner, columns],
// and for the transpose of a left factor; `transposed` for a right factor that lies as B^T. Of floats the
// first two are what they are given, and take no memory.

#pragma once

#include "matrix.h"

template <class Element>
constexpr int STEPS = 1;  // of the inner axis in an element

inline LeftFactor along_rows(const float* x, int64_t row, int, int, float*) { return {x, row, 1}; }

inline const float* across_rows(const float* x, int64_t, int, int, float*) { return x; }

inline void transposed(const float* x, int64_t row, int rows, int columns, float* to, int64_t to_row) {
    transpose(x, row, rows, columns, to, to_row);
}

#if defined(__AVX512BF16__)

struct Pair {
    int32_t both;
};
template <>
constexpr int STEPS<Pair> = 2;

inline __m512i load(const Pair* x) { return _mm512_loadu_si512(x); }

inline void add_product(Floats& sum, Pair x, __m512i right) {
    const __m512i left = _mm512_set1_epi32(x.both);
    sum = (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)left, (__m512bh)right);
}

// A vector of pairs of neighbours in a row that has so many floats, in whole vectors, from there on.
inline Floats neighbours(const float* x, int floats) {
    const Floats first = load(x), second = floats > WIDTH ? load(x + WIDTH) : Floats{};
    return (Floats)(__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
}

// In whole vectors of pairs.
inline int64_t pairs_in_row(int64_t columns) { return (columns + 2 * WIDTH - 1) / (2 * WIDTH) * WIDTH; }

inline Factor<Pair> along_rows(const float* x, int64_t row, int rows, int columns, Pair* to) {
    const int64_t to_row = pairs_in_row(row);
    for (int i = 0; i < rows; ++i, x += row)
        for (int j = 0; j < columns; j += 2 * WIDTH)
            store(reinterpret_cast<float*>(to + i * to_row + j / 2), neighbours(x + j, columns - j));
    return {to, to_row, 1};
}

// Behind the last row there is 0.
inline const Pair* across_rows(const float* x, int64_t row, int rows, int columns, Pair* to) {
    for (int i = 0; i < rows; i += 2)
        for (int j = 0; j < columns; j += WIDTH) {
            const float* from = x + i * row + j;
            const Floats first = load(from), second = i + 1 < rows ? load(from + row) : Floats{};
            const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)first));
            const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)second));
            _mm512_storeu_si512(to + i / 2 * row + j, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
        }
    return to;
}

inline void transposed(const float* x, int64_t row, int rows, int columns, Pair* to, int64_t to_row) {
    transpose([=](int i, int j) { return neighbours(x + i * row + 2 * j, columns - 2 * j); }, rows,
              pairs_in_row(columns), reinterpret_cast<float*>(to), to_row);
}

#endif

// Elements along an inner axis of so many numbers.
template <class Element>
inline int steps(int64_t count) {
    return (count + STEPS<Element> - 1) / STEPS<Element>;
}

// Elements that the functions above write, of a matrix in whole vectors.
template <class Element>
inline int64_t along_size(int64_t rows, int64_t columns) {
    return STEPS<Element> == 1 ? 0 : rows * ((columns + 2 * WIDTH - 1) / (2 * WIDTH) * WIDTH);
}

template <class Element>
inline int64_t across_size(int64_t rows, int64_t columns) {
    return STEPS<Element> == 1 ? 0 : steps<Element>(rows) * columns;
}

template <class Element>
inline int64_t transposed_size(int64_t rows, int64_t columns) {
    return rows * (STEPS<Element> == 1 ? columns : (columns + 2 * WIDTH - 1) / (2 * WIDTH) * WIDTH);
}
