// Products of bfloat16 with sums in float32, where the processor has them (AVX512-BF16): two steps of the
// inner axis at once, so factors are stored as pairs.
//
// `pack_along_rows` makes them of neighbours in a row, which a left factor A [rows, inner] takes as it lies;
// `pack_across_rows` of neighbours in a column, which a right factor B [inner, columns] takes, and the
// transpose of a left factor.

#pragma once

#include "matrix.h"

#if defined(__AVX512BF16__)

struct Pair {
    int32_t both;
};
constexpr int WIDE = 2 * WIDTH;  // numbers in a vector of pairs

inline int64_t pairs(int64_t count) { return (count + 1) / 2; }

inline void add_product(Floats& sum, Pair x, const Pair* right) {
    const __m512i left = _mm512_set1_epi32(x.both), other = _mm512_loadu_si512(right);
    sum = (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)left, (__m512bh)other);
}

// A row of floats in whole vectors to pairs, also in whole vectors.
inline void pack_along_rows(const float* from, int columns, Pair* to) {
    for (int c = 0; c < columns; c += WIDE, to += WIDTH) {
        const Floats first = load(from + c), second = c + WIDTH < columns ? load(from + c + WIDTH) : Floats{};
        _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
    }
}

// Rows of floats in whole vectors to half as many rows of pairs; behind the last row there is 0.
inline void pack_across_rows(const float* from, int64_t row, int rows, int columns, Pair* to,
                             int64_t to_row) {
    for (int r = 0; r < rows; r += 2, from += 2 * row, to += to_row)
        for (int c = 0; c < columns; c += WIDTH) {
            const Floats first = load(from + c), second = r + 1 < rows ? load(from + row + c) : Floats{};
            const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)first));
            const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)second));
            _mm512_storeu_si512(to + c, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
        }
}

#endif
