// AVX512-BF16 and AMX in plain AVX-512: `c++ -include amx.h` lets kernels that need them run without them.
//
// Tiles keep to what they were set up for: anything else ends the process.

#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace emulated {

inline uint32_t rounded(uint32_t bits) {
    if ((bits & 0x7fffffff) > 0x7f800000) return bits >> 16 | 0x40;  // NaN
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

inline float widened(uint32_t half) {
    const uint32_t bits = half << 16;
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

inline __m256bh rounded(__m512 x) {
    uint32_t from[16];
    uint16_t to[16];
    memcpy(from, &x, sizeof from);
    for (int i = 0; i < 16; ++i) to[i] = rounded(from[i]);
    __m256bh result;
    memcpy(&result, to, sizeof to);
    return result;
}

inline __m512bh rounded(__m512 second, __m512 first) {
    const __m256bh halves[2] = {rounded(first), rounded(second)};
    __m512bh result;
    memcpy(&result, halves, sizeof result);
    return result;
}

inline __m512 dot(__m512 sum, __m512bh x, __m512bh y) {
    const auto odd = [](__m512bh a) {
        return (__m512)_mm512_and_si512((__m512i)a, _mm512_set1_epi32(int(0xffff0000)));
    };
    const auto even = [](__m512bh a) { return (__m512)_mm512_slli_epi32((__m512i)a, 16); };
    return _mm512_fmadd_ps(even(x), even(y), _mm512_fmadd_ps(odd(x), odd(y), sum));
}

struct Shapes {
    uint8_t palette, first_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
};
static_assert(sizeof(Shapes) == 64, "what the processor reads");

struct Tile {
    alignas(64) uint8_t rows[16][64];
};
static thread_local Shapes shapes;
static thread_local Tile tiles[8];

inline void demand(bool holds, const char* what) {
    if (holds) return;
    fprintf(stderr, "tiles: %s\n", what);
    abort();
}

inline void configure(const void* from) {
    demand(!shapes.palette, "set up twice");
    memcpy(&shapes, from, sizeof shapes);
    demand(shapes.palette == 1 && !shapes.first_row, "another palette");
    memset(tiles, 0, sizeof tiles);
}

inline void release() { shapes = {}; }

inline void zero(int tile) {
    demand(shapes.palette, "not set up");
    memset(&tiles[tile], 0, sizeof tiles[tile]);
}

inline void load(int tile, const void* from, int64_t stride) {
    zero(tile);
    for (int i = 0; i < shapes.rows[tile]; ++i)
        memcpy(tiles[tile].rows[i], static_cast<const char*>(from) + i * stride, shapes.bytes[tile]);
}

inline void store(int tile, void* to, int64_t stride) {
    demand(shapes.palette, "not set up");
    for (int i = 0; i < shapes.rows[tile]; ++i)
        memcpy(static_cast<char*>(to) + i * stride, tiles[tile].rows[i], shapes.bytes[tile]);
}

inline void multiply(int c, int a, int b) {
    demand(shapes.palette, "not set up");
    demand(shapes.rows[c] == shapes.rows[a] && shapes.bytes[c] == shapes.bytes[b], "other outer sizes");
    demand(shapes.bytes[a] / 4 == shapes.rows[b], "other inner sizes");
    for (int i = 0; i < shapes.rows[c]; ++i) {
        __m512 sum = _mm512_load_ps(tiles[c].rows[i]);
        for (int k = 0; k < shapes.rows[b]; ++k) {
            int32_t pair;
            memcpy(&pair, tiles[a].rows[i] + 4 * k, sizeof pair);
            const __m512i left = _mm512_set1_epi32(pair), right = _mm512_load_si512(tiles[b].rows[k]);
            sum = dot(sum, (__m512bh)left, (__m512bh)right);
        }
        _mm512_store_ps(tiles[c].rows[i], sum);
    }
}

}  // namespace emulated

#define __AVX512BF16__ 1
#define _mm512_cvtneps_pbh(x) emulated::rounded(x)
#define _mm512_cvtne2ps_pbh(second, first) emulated::rounded(second, first)
#define _mm512_dpbf16_ps(sum, x, y) emulated::dot(sum, x, y)

#if !defined(NO_TILES)
#define __AMX_TILE__ 1
#define __AMX_BF16__ 1
#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(shapes) emulated::configure(shapes)
#define _tile_release() emulated::release()
#define _tile_zero(tile) emulated::zero(tile)
#define _tile_loadd(tile, from, stride) emulated::load(tile, from, stride)
#define _tile_stored(tile, to, stride) emulated::store(tile, to, stride)
#define _tile_dpbf16ps(c, a, b) emulated::multiply(c, a, b)
#define syscall(...) 0  // the system agrees
#endif
