// Numbers as torch has them: read from and written to float32, whatever their dtype.

#pragma once

#include <cstdint>
#include <cstring>

#include "layout.h"

// Elements from the first one of an array to that of a row, head and token.
inline int64_t offset(const Array& x, int64_t row, int64_t head, int64_t token) {
    return row * x.batch + head * x.head + token * x.token;
}

template <class T>
T* at(int64_t address) {
    return reinterpret_cast<T*>(address);
}

#if defined(LINATTN_NO_HALF)  // for tests
#elif defined(__ARM_FP16_FORMAT_IEEE)
#define LINATTN_HALF __fp16
#elif defined(__FLT16_MAX__) && (!defined(__clang__) || __clang_major__ >= 14)
#define LINATTN_HALF _Float16
#endif

template <class To, class From>
To bit_cast(From x) {
    static_assert(sizeof(To) == sizeof(From), "bits of another size");
    To result;
    memcpy(&result, &x, sizeof(To));
    return result;
}

#ifdef LINATTN_HALF
inline float half_to_float(uint16_t x) { return static_cast<float>(bit_cast<LINATTN_HALF>(x)); }

inline uint16_t float_to_half(float x) { return bit_cast<uint16_t>(static_cast<LINATTN_HALF>(x)); }
#else  // compilers without the type, such as GCC 11 on x86
inline float half_to_float(uint16_t x) {
    const uint32_t magnitude = x & 0x7fff, sign = static_cast<uint32_t>(x & 0x8000) << 16;
    const float result = magnitude < 0x7c00 ? bit_cast<float>(magnitude << 13) * 0x1p112f
                                            : bit_cast<float>(0x7f800000 | magnitude << 13);
    return bit_cast<float>(bit_cast<uint32_t>(result) | sign);
}

inline uint16_t float_to_half(float x) {  // to the nearest, ties to even
    const uint32_t bits = bit_cast<uint32_t>(x), magnitude = bits & 0x7fffffff, sign = bits >> 16 & 0x8000;
    uint32_t result;
    if (magnitude > 0x7f800000)
        result = 0x7e00;
    else if (magnitude >= 0x47800000)
        result = 0x7c00;
    else if (magnitude < 0x38800000)  // below the least normal number: the sum of floats rounds
        result = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - bit_cast<uint32_t>(0.5f);
    else
        result = (magnitude + 0xc8000fff + (magnitude >> 13 & 1)) >> 13;
    return static_cast<uint16_t>(result | sign);
}
#endif

inline float bfloat16_to_float(uint16_t x) { return bit_cast<float>(static_cast<uint32_t>(x) << 16); }

inline uint16_t float_to_bfloat16(float x) {  // to the nearest, ties to even; NaN stays NaN
    const uint32_t bits = bit_cast<uint32_t>(x);
    if (x != x) return 0x7fc0;
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

constexpr int AHEAD = 8;  // tokens; heads lie between them in memory, so processors do not guess what comes

template <bool to_write = false, class T>
inline void prefetch(const T* source, int64_t token, int count) {
    const char* ahead = reinterpret_cast<const char*>(source + AHEAD * token);
    for (int i = 0; i < count * static_cast<int>(sizeof(T)); i += 64) __builtin_prefetch(ahead + i, to_write);
}

// `count` numbers to float32.
inline void read(const Array& x, int64_t from, int count, float* to) {
    if (x.dtype == FLOAT32) {
        const float* source = at<float>(x.data) + from;
        prefetch(source, x.token, count);
        for (int i = 0; i < count; ++i) to[i] = source[i];
        return;
    }
    const uint16_t* source = at<uint16_t>(x.data) + from;
    prefetch(source, x.token, count);
    if (x.dtype == BFLOAT16)
        for (int i = 0; i < count; ++i) to[i] = bfloat16_to_float(source[i]);
    else
        for (int i = 0; i < count; ++i) to[i] = half_to_float(source[i]);
}

inline void write(const Array& x, int64_t to, int count, const float* from) {
    if (x.dtype == FLOAT32) {
        float* target = at<float>(x.data) + to;
        prefetch<true>(target, x.token, count);
        for (int i = 0; i < count; ++i) target[i] = from[i];
        return;
    }
    uint16_t* target = at<uint16_t>(x.data) + to;
    prefetch<true>(target, x.token, count);
    if (x.dtype == BFLOAT16)
        for (int i = 0; i < count; ++i) target[i] = float_to_bfloat16(from[i]);
    else
        for (int i = 0; i < count; ++i) target[i] = float_to_half(from[i]);
}
