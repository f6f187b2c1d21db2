// Products of pairs of bfloat16 on tiles: 16 rows at a time, where the processor has AMX.
//
// A tile is a matrix of 16 rows of 64 bytes. C [16, 16] += A [16, 32] B [32, 16] is one instruction: A as
// `along_rows` lays pairs out, B as `across_rows` and `transposed` do.

#pragma once

#include "operands.h"

// Whether a kernel computes on tiles, which its thread has to set up.
template <class Kernel>
constexpr bool ON_TILES = false;

// Nothing to set up.
template <bool on_tiles>
struct TileSetup {};

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__)

template <template <class> class Kernel>
constexpr bool ON_TILES<Kernel<Pair>> = true;
template <>
constexpr int STRIP<Pair> = 16;

// Ask the system for the memory of tiles, for the process: whether it agrees.
inline bool tiles_permitted() {
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // as asm/prctl.h has them
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

// Tiles 0 to 3 are sums, 4 and 5 factors, 6 and 7 factors of half the inner axis. Others in the process, such
// as oneDNN, set them up for themselves.
template <>
struct TileSetup<true> {
    TileSetup() {
        struct alignas(64) {
            uint8_t palette = 1, first_row = 0, reserved[14] = {};
            uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 32, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 8};
        } shapes;
        _tile_loadconfig(&shapes);
    }
    ~TileSetup() { _tile_release(); }
    TileSetup(const TileSetup&) = delete;
};

// What is written before is there for tiles, and the other way round: compilers do not know that they read.
inline void order_memory() { asm volatile("" ::: "memory"); }

// One step of the inner axis, in tiles A and B, of the sums below: instructions take numbers as written.
#define ADD_STEP(A, B)                   \
    _tile_loadd(A, a + k, a_bytes);      \
    _tile_loadd(B, b, b_bytes);          \
    _tile_dpbf16ps(0, A, B);             \
    if constexpr (V > 1) {               \
        _tile_loadd(B, b + 16, b_bytes); \
        _tile_dpbf16ps(1, A, B);         \
    }                                    \
    if constexpr (V > 2) {               \
        _tile_loadd(B, b + 32, b_bytes); \
        _tile_dpbf16ps(2, A, B);         \
        _tile_loadd(B, b + 48, b_bytes); \
        _tile_dpbf16ps(3, A, B);         \
    }

// 16 rows and V tiles of columns of C = A B, or C += A B; the pairs of `inner` in whole halves of a tile.
template <int V>
inline void sum_on_tiles(const Pair* a, int64_t a_row, int inner, const Pair* b, int64_t b_row, float* c,
                         int64_t c_row, bool add) {
    const int64_t a_bytes = a_row * sizeof *a, b_bytes = b_row * sizeof *b, c_bytes = c_row * sizeof *c;
    _tile_zero(0);
    if constexpr (V > 1) _tile_zero(1);
    if constexpr (V > 2) {
        _tile_zero(2);
        _tile_zero(3);
    }
    if (add) {
        _tile_loadd(0, c, c_bytes);
        if constexpr (V > 1) _tile_loadd(1, c + 16, c_bytes);
        if constexpr (V > 2) {
            _tile_loadd(2, c + 32, c_bytes);
            _tile_loadd(3, c + 48, c_bytes);
        }
    }
    int k = 0;
    for (; k + 16 <= inner; k += 16, b += 16 * b_row) {
        ADD_STEP(4, 5)
    }
    if (k < inner) {
        ADD_STEP(6, 7)
    }
    _tile_stored(0, c, c_bytes);
    if constexpr (V > 1) _tile_stored(1, c + 16, c_bytes);
    if constexpr (V > 2) {
        _tile_stored(2, c + 32, c_bytes);
        _tile_stored(3, c + 48, c_bytes);
    }
}

#undef ADD_STEP

// 16 rows of C = A B, or C += A B, of a dense A; `columns` in whole vectors.
__attribute__((noinline)) inline void strip_on_tiles(const Pair* a, int64_t a_row, int inner, const Pair* b,
                                                     int64_t b_row, float* c, int64_t c_row, int columns,
                                                     bool add) {
    order_memory();
    int v = 0;
    for (; v + 64 <= columns; v += 64) sum_on_tiles<4>(a, a_row, inner, b + v, b_row, c + v, c_row, add);
    for (; v + 32 <= columns; v += 32) sum_on_tiles<2>(a, a_row, inner, b + v, b_row, c + v, c_row, add);
    for (; v < columns; v += 16) sum_on_tiles<1>(a, a_row, inner, b + v, b_row, c + v, c_row, add);
    order_memory();
}

// A^T [16, inner] of pairs that lie along the columns of A.
inline void turn_left(const Factor<Pair>& a, int row, int inner, Pair* to, int64_t to_row) {
    const Pair* from = a.data + row;
    transpose(
        [=](int k, int) {
            return k < inner ? load(reinterpret_cast<const float*>(from + k * a.along_columns)) : Floats{};
        },
        padded(inner), 16, reinterpret_cast<float*>(to), to_row);
}

// Rows `row` to `row + count` (at most STRIP<Pair>) of C = A B, or C += A B. Fewer rows, and pairs behind
// whole halves of a tile, are multiplied in vectors.
inline void rows_of_product(const Factor<Pair>& a, int row, int count, int inner, const Pair* b,
                            int64_t b_row, float* c, int64_t c_row, int columns, bool add) {
    constexpr int PART = 256;  // pairs that are turned at a time
    alignas(64) Pair turned[16 * PART];
    int done = 0;
    while (count == 16 && inner - done >= 8) {
        const int part = std::min(PART, inner - done) / 8 * 8;
        const Factor<Pair> rest{a.data + done * a.along_columns, a.along_rows, a.along_columns};
        const bool lies = a.along_columns == 1;
        if (!lies) turn_left(rest, row, part, turned, PART);
        strip_on_tiles(lies ? rest.data + row * a.along_rows : turned, lies ? a.along_rows : PART, part,
                       b + done * b_row, b_row, c + row * c_row, c_row, columns, add || done);
        done += part;
    }
    if (done == inner && done) return;
    const Factor<Pair> rest{a.data + done * a.along_columns, a.along_rows, a.along_columns};
    for (int i = row; i < row + count; i += ROWS)
        few_rows_of_product(rest, i, std::min(ROWS, row + count - i), inner - done, b + done * b_row, b_row,
                            c, c_row, columns, add || done);
}

#else

inline bool tiles_permitted() { return true; }

#endif
